"""What drivers ask of HTTP servers, waiting for what is so, and ports that somebody listens on."""
import json
import re
import socket
import time
import urllib.request


def fetch(url, body=None, timeout=300):
    """The answer to GET, or to POST of a JSON body, as text."""
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=timeout).read().decode()


def figure(url, name):
    """The sum of a metric's series at url/metrics. A metric that the server does not have is an error: it would always be 0."""
    text = fetch(url + "/metrics")
    if f"# TYPE {name} " not in text:
        raise RuntimeError(f"{url} has no metric {name}")
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{[^}}]*}})? ([-+0-9.e]+)$", text, re.MULTILINE))


def until(what, f, seconds=300):
    """Calls f until it answers something true; a server that does not answer is asked again."""
    end = time.monotonic() + seconds
    while True:
        try:
            if f():
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)


def listens(port):
    """Whether somebody listens there, on this host. For until: it raises OSError where nobody does."""
    socket.create_connection(("127.0.0.1", port), 10).close()
    return True
