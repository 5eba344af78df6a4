// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"log/slog"
	"net"
	"os"
	"sync"
)

// notify sends a state, such as READY=1, to the service manager that has started this process and waits for that: a datagram to the
// UNIX socket $NOTIFY_SOCKET, as systemd expects from units with Type=notify (sd_notify(3)). If that variable is not set, it does
// nothing.
func notify(log *slog.Logger, state string) {
	path := os.Getenv("NOTIFY_SOCKET") // "@NAME" is in the abstract namespace, as in package net
	if path == "" {
		return
	}
	conn, err := net.Dial("unixgram", path)
	if err == nil {
		_, err = conn.Write([]byte(state))
		_ = conn.Close()
	}
	if err != nil {
		log.Warn("the service manager could not be notified", "socket", path, "state", state, "err", err)
	}
}

// whenOver calls f when ctx ends, unless the caller has called the function `end` before. If ctx has ended, `end` returns only after f has
// returned; otherwise `end` makes sure that f is never called. A context closes its channel before it starts its AfterFuncs, so `end` may be
// called before f was started: then `end` itself calls f.
func whenOver(ctx context.Context, f func()) (end func()) {
	once := sync.OnceFunc(f) // a second call waits for the first one
	stop := context.AfterFunc(ctx, once)
	return func() {
		if stop(); ctx.Err() != nil {
			once()
		}
	}
}
