"""What people look at: the terminal (`terminal`), the browser (`web`) and a file to send
(`report`).
"""
