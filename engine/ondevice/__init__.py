"""What is checked and measured on a GPU (`.ci/gpu`); without one at toy size, in Triton's interpreter."""
