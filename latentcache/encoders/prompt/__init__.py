"""Text encoders of diffusion pipelines."""
