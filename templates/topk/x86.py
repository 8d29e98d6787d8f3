KERNEL = None
