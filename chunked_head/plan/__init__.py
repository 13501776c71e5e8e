"""From a call's sizes to its plan: chunks, schedule, buffers and their memory."""
