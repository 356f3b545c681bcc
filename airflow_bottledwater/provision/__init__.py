"""What is made, checked and dropped around a pipeline: preflight, slot and publications and topics, dead letters."""
