"""A TCP proxy on 127.0.0.1 that can be slow."""
import socket
import threading
import time


class Proxy:
    """Passes connections on. What comes back shares rate bytes per second while it is slow."""

    def __init__(self, port, target, rate):
        self.target, self.rate, self.slow, self.lock, self.free = target, rate, False, threading.Lock(), 0.0
        self.listening = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client = self.listening.accept()[0]
            server = socket.create_connection(("127.0.0.1", self.target))
            for a, b, back in ((client, server, False), (server, client, True)):
                threading.Thread(target=self.pump, args=(a, b, back), daemon=True).start()

    def wait(self, n):
        """Waits until n bytes more may pass: in turn, whatever connection they are of."""
        with self.lock:
            now = time.monotonic()
            self.free = max(self.free, now) + n / self.rate
            pause = self.free - now
        time.sleep(pause)

    def pump(self, a, b, back):
        try:
            while data := a.recv(16384):
                if back and self.slow:
                    self.wait(len(data))
                b.sendall(data)
        except OSError:
            pass
        for s in (a, b):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
