"""What travels between ingresses, engine replicas, coordinators and ranks: ZeroMQ and msgpack, never pickle.

messages   what ingress, engine replica and coordinator send each other
channel    the links, each with its high-water mark, and the encoding
sockets    where sockets bind, how they are secured, how a peer's death is noticed
reactor    one thread's waiting on sockets and on work from other threads
keys       the transport of a process, and the application's keys, handed out through Ray
discovery  coordinators by name, found through Ray
"""
