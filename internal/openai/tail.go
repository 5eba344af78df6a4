package openai

import "bytes"

// tailBytes is how much of a stream's end is looked at: its last event.
const tailBytes = 32

// Tail keeps the last bytes of a stream, to know whether it ended as one should. The zero value is ready.
type Tail struct {
	b [tailBytes]byte
	n int
}

// Add takes the next bytes.
func (t *Tail) Add(data []byte) {
	if len(data) >= tailBytes {
		t.n = copy(t.b[:], data[len(data)-tailBytes:])
		return
	}
	if over := t.n + len(data) - tailBytes; over > 0 {
		copy(t.b[:], t.b[over:t.n])
		t.n -= over
	}
	t.n += copy(t.b[t.n:], data)
}

// Done reports whether the last event was Done.
func (t *Tail) Done() bool {
	end := bytes.TrimRight(t.b[:t.n], "\r\n")
	return bytes.HasSuffix(end, []byte("data: "+Done)) || bytes.HasSuffix(end, []byte("data:"+Done))
}
