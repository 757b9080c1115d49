from kvpilot.cli import main

main()
