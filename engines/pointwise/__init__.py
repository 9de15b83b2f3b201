"""The pointwise family: graphs of pointwise and reduction nodes alone."""
