"""Readers: each turns a set into samples, rejections and notes."""
