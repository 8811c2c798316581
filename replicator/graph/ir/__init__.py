"""What a graph holds: placeholders, facts about ops, captures."""
