"""How people and programs look at the coordinator and tell it what to do; and where it keeps its memory."""
