"""The demo: real GRPO jobs that share one small device. An example of use, and a measurement."""
