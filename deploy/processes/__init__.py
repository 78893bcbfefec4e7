"""The processes of a server, and how they end. Needs the standard library only.

guard          receives signals for the server, and ends its processes after a crash
server_record  files that list the processes of each server and node
"""
