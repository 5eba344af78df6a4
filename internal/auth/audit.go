// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"regexp"
	"sync/atomic"
	"syscall"
	"time"
)

// Limits of an audit log: its file, and auditFiles earlier files, each of at most maxAuditFile bytes.
const (
	maxAuditFile  = 16 << 20
	auditFiles    = 4
	maxAuditField = 512 // longest path or query in a line, in bytes; longer ones are cut
)

// Audit is the log of the requests of administrators: one line of JSON for each, in a file of its own. Several listeners and processes
// may share the file. Its methods are safe for concurrent use.
type Audit struct {
	path     string
	maxBytes int64
	lost     atomic.Uint64
}

// OpenAudit opens the log in the file at path. It creates a missing file, which only its owner may read.
func OpenAudit(path string) (*Audit, error) {
	a := &Audit{path: path, maxBytes: maxAuditFile}
	if err := a.write(nil); err != nil {
		return nil, fmt.Errorf("log of deeds (--audit-log): %w", err)
	}
	return a, nil
}

// AuditRecord is one line of the log: one request of an administrator.
type AuditRecord struct {
	Time     time.Time `json:"time"`
	Listener string    `json:"listener"`
	Who      string    `json:"who"` // name of the token, "key", or subject of the certificate; "": the Gate asks for no credential
	From     string    `json:"from"`
	Method   string    `json:"method"`
	Path     string    `json:"path"`
	Query    string    `json:"query,omitempty"`
	Status   int       `json:"status"`
}

// record writes one record to the log.
func (a *Audit) record(d AuditRecord) error {
	line, err := json.Marshal(d)
	if err == nil {
		err = a.write(append(line, '\n'))
	}
	if err != nil {
		a.lost.Add(1)
	}
	return err
}

// write appends a line to the file. It opens the file each time: such requests are rare, and another process may have rotated the file.
func (a *Audit) write(line []byte) error {
	for {
		f, err := os.OpenFile(a.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NONBLOCK, 0o600)
		if err != nil {
			return err
		}
		done, err := a.writeTo(f, line)
		if err = errors.Join(err, f.Close()); err != nil || done {
			return err
		}
	}
}

// writeTo appends a line to f. done is false if the file at the path must be opened again: f is no longer that file, or writeTo has
// rotated it because the line did not fit in maxBytes.
func (a *Audit) writeTo(f *os.File, line []byte) (done bool, err error) {
	if err := lock(f); err != nil {
		return false, err
	}
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !info.Mode().IsRegular() {
		return false, &FileError{a.path, "not a regular file"}
	}
	at, err := os.Stat(a.path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(at, info) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if info.Size() > 0 && info.Size()+int64(len(line)) > a.maxBytes {
		return false, a.rotate()
	}
	_, err = f.Write(line)
	return err == nil, err
}

// lockWait bounds how long a write waits for another process that is writing the file; then the write fails, and its line is lost.
const lockWait = time.Second

// lock locks the file f until f is closed. It returns a *FileError if another process holds the lock for longer than lockWait.
func lock(f *os.File) error {
	for until := time.Now().Add(lockWait); ; time.Sleep(5 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return err
		}
		if time.Now().After(until) {
			return &FileError{f.Name(), "another process has locked it"}
		}
	}
}

// rotate renames the file to FILE.1, FILE.1 to FILE.2, and so on. The oldest file is overwritten.
func (a *Audit) rotate() error {
	name := func(i int) string {
		if i == 0 {
			return a.path
		}
		return fmt.Sprintf("%s.%d", a.path, i)
	}
	for i := auditFiles - 1; i >= 0; i-- {
		if err := os.Rename(name(i), name(i+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// login matches a user and a password before the host in a URL.
var login = regexp.MustCompile(`//[^/?#]*(@|%40)`)

func cut(text string) string {
	text = login.ReplaceAllString(text, "//")
	return text[:min(len(text), maxAuditField)]
}

// audited reports whether the audit log gets a line for a request that needs the right need: if that is NeedAdmin, or for a DELETE.
func audited(r *http.Request, need Need) bool {
	return need == NeedAdmin || need == NeedWrite && r.Method == http.MethodDelete
}

// serveAudited serves a request of the client `who` and then writes its line to the audit log, unless it is answered with 401 or 403. If
// the line cannot be written, the server's log gets it.
func (g *Gate) serveAudited(w http.ResponseWriter, r *http.Request, who string, h http.Handler) {
	d := AuditRecord{
		Time: time.Now().UTC(), Listener: g.o.Listener, Who: who, From: r.RemoteAddr, Method: cut(r.Method), Path: cut(r.URL.Path), Query: cut(r.URL.RawQuery),
		Status: http.StatusInternalServerError, // stays if h panics
	}
	answer := &statusWriter{ResponseWriter: w, status: http.StatusOK}
	defer func() {
		if d.Status == http.StatusUnauthorized || d.Status == http.StatusForbidden {
			return
		}
		if err := g.o.Audit.record(d); err != nil {
			g.o.Log.Error("a deed is not in the log of deeds", "who", d.Who, "from", d.From, "method", d.Method, "path", d.Path, "status", d.Status, "err", err)
		}
	}()
	h.ServeHTTP(answer, r)
	d.Status = answer.status
}

// statusWriter remembers the status of the answer.
type statusWriter struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (w *statusWriter) WriteHeader(status int) {
	if status >= 200 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
