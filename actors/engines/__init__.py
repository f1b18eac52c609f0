"""Generation engines behind the generator actor."""
