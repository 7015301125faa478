"""The page exchange: transfers of pages between nodes."""
