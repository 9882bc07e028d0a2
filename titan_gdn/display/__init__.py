"""What a terminal shows: tables that fit its width, and a line that says what a long step is doing."""
