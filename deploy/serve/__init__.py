"""`aerie serve`: one server, from its start to its end.

arguments      the arguments of the command, and of `aerie plan`
launch         the start, in order; the end: running requests finish, new ones are refused
environment    variables for Ray's, Serve's and HAProxy's processes
python_proxy   removes headers that Serve's Python proxy cannot read
guest          our applications on a cluster that others use too
applications   what Serve says of its applications; safe beside a deploying thread
check_process  checks the checkpoints while Ray starts, then starts the ranks
ray_start      joins a Ray cluster or starts one; its session folder; without a home folder; a raylet that a busy
               machine does not end, and that is started again
address        the HTTP address, and the line printed when the server is ready
console        terminal output and the log
watches        HAProxy and Ray, stopped processes, starts that cannot succeed
"""
