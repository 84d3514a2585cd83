"""What Ray starts in place of Python: has a worker forked that has its imports (warm.py), and ends."""

import array
import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    asked = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(asked).encode()
    streams = array.array("i", [0, 1, 2]).tobytes()
    sent = server.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(text[sent:])
    server.shutdown(socket.SHUT_WR)
    sys.exit(0 if server.recv(64) else "no worker was forked")
