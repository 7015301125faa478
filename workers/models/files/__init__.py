"""Model files: finding, reading, dequantizing, converting and identifying them."""
