"""What generated text means: reasoning, content and tool calls, told apart as the text grows."""
