"""The loop that joins the rooms: observe, map, decide, act, observe again."""
