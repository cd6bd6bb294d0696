"""ringweave inside other libraries; each is imported only where it is used."""
