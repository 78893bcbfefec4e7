"""What travels between ingresses, engine replicas, coordinators and ranks: ZeroMQ and msgpack, never pickle.

messages   what they send each other
encoding   messages as bytes
channel    the connections, each with its high-water mark
sockets    where sockets bind, how they are secured, how a peer's death is noticed
listener   a socket in an asyncio loop
reactor    one thread's waiting on sockets and on work from other threads
folders    private folders of processes, and what killed ones left
keys       the transport of a process, and the application's keys, handed out through Ray
discovery  coordinators by name, found through Ray
"""
