"""What one family needs beyond the generic path."""
