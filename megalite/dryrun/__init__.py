"""The real code of any rank of any run on tensors without memory: what it holds, computes and sends."""
