"""What makes a notebook kernel a good controller."""
