// SPDX-License-Identifier: Apache-2.0

package http1

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"time"
)

// Response is an answer whose head has been read. Read its body with Next or Read, and then call Close.
type Response struct {
	Status int
	Fields []Field
	Length int64 // length of the body; -1: unknown

	n       *Conn
	chunked bool
	old     bool  // HTTP/1.0
	left    int64 // bytes left of the body, or of the current chunk
	end     error // what Next returns from now on; nil: the body goes on
	close   bool  // the connection cannot be used again
	lent    int   // buffered bytes that Next has lent to the caller
	started bool  // at least one chunk was read
	excess  int64 // bytes of chunk-size lines beyond what is usual for their data
}

// Field returns the first value of the header with that canonical name; "": there is none.
func (r *Response) Field(name string) string {
	for i := range r.Fields {
		if r.Fields[i].Name == name {
			return r.Fields[i].Value
		}
	}
	return ""
}

// head reads the head of an answer. It skips informational answers (1xx).
func (n *Conn) head(method string) (*Response, error) {
	for range 8 {
		r, err := n.oneHead()
		if err != nil {
			return nil, err
		}
		if r.Status >= 100 && r.Status < 200 {
			continue
		}
		return r, r.frame(method)
	}
	return nil, fmt.Errorf("%w: only informational answers", ErrAnswer)
}

func (n *Conn) oneHead() (*Response, error) {
	left := maxHead
	line, err := n.line(&left)
	if err != nil {
		return nil, err
	}
	r := &Response{n: n, Length: -1}
	version, rest, _ := bytes.Cut(line, []byte(" "))
	code, _, _ := bytes.Cut(rest, []byte(" "))
	if r.Status, err = strconv.Atoi(string(code)); err != nil || len(code) != 3 || r.Status < 100 || string(version) != "HTTP/1.1" && string(version) != "HTTP/1.0" {
		return nil, fmt.Errorf("%w: %.60q", ErrAnswer, line)
	}
	r.old = string(version) != "HTTP/1.1"
	r.close = r.old
	r.Fields = make([]Field, 0, 8)
	for {
		line, err := n.line(&left)
		if err != nil {
			return nil, err
		}
		if len(line) == 0 {
			return r, nil
		}
		name, value, ok := cutField(line)
		if !ok || len(r.Fields) == maxFields {
			return nil, fmt.Errorf("%w: %.60q", ErrAnswer, line)
		}
		r.Fields = append(r.Fields, Field{canonical(name), string(bytes.Trim(value, " \t"))})
	}
}

// cutField splits a header line into name and value. ok is false if it is not a valid header line (RFC 9112, 5).
func cutField(line []byte) (name, value []byte, ok bool) {
	name, value, ok = bytes.Cut(line, []byte(":"))
	ok = ok && isToken(name) && !bytes.ContainsFunc(value, func(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f })
	return name, value, ok
}

func isToken(b []byte) bool {
	for _, c := range b {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return len(b) > 0
}

// canonical returns a header's name in the form of http.Header, without allocating the frequent names.
func canonical(name []byte) string {
	switch string(name) {
	case "content-type", "Content-Type":
		return "Content-Type"
	case "content-length", "Content-Length":
		return "Content-Length"
	case "transfer-encoding", "Transfer-Encoding":
		return "Transfer-Encoding"
	case "date", "Date":
		return "Date"
	case "server", "Server":
		return "Server"
	case "connection", "Connection":
		return "Connection"
	}
	return textproto.CanonicalMIMEHeaderKey(string(name))
}

// frame finds out from the headers where the body ends.
func (r *Response) frame(method string) error {
	lengths := 0
	for _, f := range r.Fields {
		switch f.Name {
		case "Content-Length":
			n, err := strconv.ParseUint(f.Value, 10, 63)
			if err != nil || lengths > 0 && int64(n) != r.Length {
				return fmt.Errorf("%w: its Content-Length is %.30q", ErrAnswer, f.Value)
			}
			lengths++
			r.Length = int64(n)
		case "Transfer-Encoding":
			if !strings.EqualFold(f.Value, "chunked") || r.chunked || r.old {
				return fmt.Errorf("%w: its Transfer-Encoding is %.30q", ErrAnswer, f.Value)
			}
			r.chunked = true
		case "Trailer":
			for name := range strings.SplitSeq(f.Value, ",") {
				switch textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)) {
				case "Content-Length", "Transfer-Encoding", "Trailer": // a trailer must not change where the body ends
					return fmt.Errorf("%w: its Trailer is %.60q", ErrAnswer, f.Value)
				}
			}
		case "Connection":
			for token := range strings.SplitSeq(f.Value, ",") {
				r.close = r.close || strings.EqualFold(strings.TrimSpace(token), "close")
			}
		}
	}
	switch {
	case method == http.MethodHead || r.Status == http.StatusNoContent || r.Status == http.StatusNotModified:
		r.Length, r.chunked, r.end = 0, false, io.EOF
	case r.chunked:
		if lengths > 0 {
			return fmt.Errorf("%w: it is chunked and has a Content-Length", ErrAnswer)
		}
	case r.Length < 0:
		r.close = true // the body ends when the connection ends
	case r.Length == 0:
		r.end = io.EOF
	}
	r.left = max(r.Length, 0)
	return nil
}

// Until sets a deadline for all later reads; the zero time removes it.
func (r *Response) Until(t time.Time) {
	_ = r.n.nc.SetReadDeadline(t) // a closed connection fails when it is read
	if r.n.ended() != nil {
		_ = r.n.nc.SetReadDeadline(past) // the context may have ended before the line above
	}
}

// Next waits for bytes of the body and returns those that have come, at least one; they are valid until the next call. At the end of a
// complete body it returns io.EOF, at the end of a cut one io.ErrUnexpectedEOF.
func (r *Response) Next() ([]byte, error) {
	if r.lent > 0 {
		_, _ = r.n.br.Discard(r.lent) // it is buffered
		r.lent = 0
	}
	if r.end != nil {
		return nil, r.end
	}
	b, err := r.next()
	if err != nil {
		if r.end = err; !errors.Is(err, io.EOF) {
			r.close = true
		}
		return nil, err
	}
	r.lent = len(b)
	return b, nil
}

// More reports whether Next would return bytes without waiting.
func (r *Response) More() bool {
	n := r.n.br.Buffered() - r.lent
	if r.end != nil || n <= 0 {
		return false
	}
	if !r.chunked || r.left > 0 {
		return true
	}
	b, _ := r.n.br.Peek(r.lent + n)
	// There must be a whole line with a chunk's size, and bytes after it.
	i := bytes.IndexByte(bytes.TrimLeft(b[r.lent:], "\r\n"), '\n')
	return i >= 0 && i+2 < n
}

func (r *Response) next() ([]byte, error) {
	if r.chunked && r.left == 0 {
		if err := r.chunk(); err != nil {
			return nil, err
		}
	} else if r.Length >= 0 && r.left == 0 {
		return nil, io.EOF
	}
	if _, err := r.n.br.Peek(1); err != nil {
		if errors.Is(err, io.EOF) && (r.chunked || r.Length >= 0) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	n := r.n.br.Buffered()
	if r.chunked || r.Length >= 0 {
		n = int(min(int64(n), r.left))
		r.left -= int64(n)
	}
	return r.n.br.Peek(n)
}

// Read implements io.Reader. If p is large, bytes that are not buffered yet are read from the connection directly into p.
func (r *Response) Read(p []byte) (int, error) {
	if r.lent > 0 {
		_, _ = r.n.br.Discard(r.lent) // it is buffered
		r.lent = 0
	}
	if r.end != nil {
		return 0, r.end
	}
	n, err := r.read(p)
	if err != nil {
		if r.end = err; !errors.Is(err, io.EOF) {
			r.close = true
		}
	}
	return n, err
}

func (r *Response) read(p []byte) (int, error) {
	framed := r.chunked || r.Length >= 0
	if r.chunked && r.left == 0 {
		if err := r.chunk(); err != nil {
			return 0, err
		}
	}
	if framed && r.left == 0 {
		return 0, io.EOF
	}
	if framed {
		p = p[:min(int64(len(p)), r.left)]
	}
	n, err := r.n.br.Read(p)
	r.left -= int64(n)
	if errors.Is(err, io.EOF) && framed {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// chunk reads up to the first byte of the next chunk. It returns io.EOF after the last chunk and the trailer. It is as strict as
// net/http (RFC 9112, 7.1): lines must end with CRLF and have no other CR, and sizes and extensions together must not be much longer
// than the data.
func (r *Response) chunk() error {
	left := maxChunkLine
	if r.started {
		if line, err := r.n.rawLine(&left); err != nil {
			return err
		} else if string(line) != "\r\n" {
			return fmt.Errorf("%w: a chunk is longer than it says", ErrAnswer)
		}
	}
	r.started = true
	line, err := r.n.rawLine(&left)
	if err != nil {
		return err
	}
	if len(line) < 2 || bytes.IndexByte(line, '\r') != len(line)-2 {
		return fmt.Errorf("%w: the size of a chunk is %.30q", ErrAnswer, line)
	}
	size, _, _ := bytes.Cut(bytes.TrimRight(line[:len(line)-2], " \t"), []byte(";"))
	n, err := strconv.ParseUint(string(size), 16, 62)
	if err != nil || len(size) > 16 {
		return fmt.Errorf("%w: the size of a chunk is %.30q", ErrAnswer, line)
	}
	if r.excess = max(r.excess+int64(len(line)-16)-2*int64(min(n, maxExcess)), 0); r.excess > maxExcess {
		return fmt.Errorf("%w: the lines with sizes of chunks are longer than the data", ErrAnswer)
	}
	if r.left = int64(n); n > 0 {
		return nil
	}
	return r.trailer()
}

// trailer reads and drops the header lines after the last chunk; it returns io.EOF at their end. It accepts what net/http accepts:
// lines that end with CRLF, at most maxTrailer bytes in all.
func (r *Response) trailer() error {
	left := maxTrailer
	for {
		line, err := r.n.rawLine(&left)
		if err != nil {
			return err
		}
		field, ok := bytes.CutSuffix(line, []byte("\r\n"))
		if ok && len(field) == 0 {
			return io.EOF
		}
		if ok {
			_, _, ok = cutField(field)
		}
		if !ok {
			return fmt.Errorf("%w: a line of the trailer is %.60q", ErrAnswer, line)
		}
	}
}

// ReadAll reads the rest of the body. More than limit bytes are an error.
func (r *Response) ReadAll(limit int) ([]byte, error) {
	var all []byte
	if r.Length > 0 && r.Length <= int64(limit) {
		all = make([]byte, 0, r.Length)
	}
	for {
		b, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		if len(all)+len(b) > limit {
			return all, fmt.Errorf("%w: a body of more than %d bytes", ErrAnswer, limit)
		}
		all = append(all, b...)
	}
}

// Close ends the answer. If the body was read to its end, the connection can be used again.
func (r *Response) Close() {
	n := r.n
	if n == nil {
		return
	}
	r.n = nil
	if r.lent > 0 {
		_, _ = n.br.Discard(r.lent) // it is buffered
	}
	if !errors.Is(r.end, io.EOF) && r.Length >= 0 && r.left == 0 && !r.chunked {
		r.end = io.EOF // the whole body was read, although the caller has not seen io.EOF
	}
	if r.close || !errors.Is(r.end, io.EOF) {
		n.close()
		return
	}
	n.keep()
}
