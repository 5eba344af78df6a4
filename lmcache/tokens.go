package lmcache

import (
	"encoding/binary"
	"errors"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/kv"
)

// ErrToken means that a token list holds something else than integers of 0 to
// 2^32-1, or ends early.
var ErrToken = errors.New("lmcache: token list holds no uint32 or ends early")

// tokenForm says how to take a token out of the eight bytes that begin with its
// msgpack type byte: (word >> shift) & mask, width bytes in all. width 0 marks a
// type byte that the fast loop leaves to slowToken.
type tokenForm struct {
	mask  uint32
	shift uint8
	width uint8
}

var tokenForms = func() (t [256]tokenForm) {
	for c := range 0x80 {
		t[c] = tokenForm{0x7f, 56, 1}
	}
	t[0xcc] = tokenForm{0xff, 48, 2}       // uint8
	t[0xcd] = tokenForm{0xffff, 40, 3}     // uint16
	t[0xce] = tokenForm{0xffffffff, 24, 5} // uint32
	return t
}()

// readTokens decodes n tokens from b into dst, 4 bytes each, big-endian, and
// returns the number of bytes read. A nil dst only skips them.
func readTokens(dst, b []byte, n int) (int, error) {
	p := 0
	for i := range n {
		if len(b)-p >= 8 {
			word := binary.BigEndian.Uint64(b[p:])
			if f := tokenForms[byte(word>>56)]; f.width != 0 {
				if dst != nil {
					binary.BigEndian.PutUint32(dst[4*i:], uint32(word>>f.shift)&f.mask)
				}
				p += int(f.width)
				continue
			}
		}
		v, width, err := slowToken(b[p:])
		if err != nil {
			return p, err
		}
		if dst != nil {
			binary.BigEndian.PutUint32(dst[4*i:], v)
		}
		p += width
	}
	return p, nil
}

// slowToken reads one token near the end of the frame, or in a wider form than
// it needs.
func slowToken(b []byte) (uint32, int, error) {
	if t := msgp.NextType(b); t != msgp.IntType && t != msgp.UintType {
		return 0, 0, ErrToken
	}
	v, rest, err := msgp.ReadInt64Bytes(b)
	if err != nil || v < 0 || v > 0xffffffff {
		return 0, 0, ErrToken
	}
	return uint32(v), len(b) - len(rest), nil
}

// AppendTokens appends tokens as a msgpack array of shortest-form integers.
func AppendTokens(b []byte, tokens []uint32) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, t := range tokens {
		switch {
		case t < 0x80:
			b = append(b, byte(t))
		case t <= 0xff:
			b = append(b, 0xcc, byte(t))
		case t <= 0xffff:
			b = append(b, 0xcd, byte(t>>8), byte(t))
		default:
			b = append(b, 0xce, byte(t>>24), byte(t>>16), byte(t>>8), byte(t))
		}
	}
	return b
}

// hashTokens reads an encoded token list, header included. It appends the hash
// of each complete chunk to hashes and returns the number of tokens and the
// bytes that follow the list.
func (m *Memo) hashTokens(b []byte, hashes []kv.Hash) (out []kv.Hash, tokens int, rest []byte, err error) {
	tokens, b, err = readArray(b)
	if err != nil {
		return hashes, 0, b, err
	}
	hashes, b = m.known(b, tokens/m.chunkTokens, hashes)
	left := tokens - len(hashes)*m.chunkTokens
	if left >= m.chunkTokens {
		known := len(hashes)
		start := b
		s := m.scratch.Get().(*memoScratch)
		defer m.scratch.Put(s)
		s.widths = s.widths[:0]
		prev := kv.Seed
		if known > 0 {
			prev = hashes[known-1]
		}
		for ; left >= m.chunkTokens; left -= m.chunkTokens {
			n, err := readTokens(s.chain.Tokens(), b, m.chunkTokens)
			if err != nil {
				return hashes, 0, b, err
			}
			b = b[n:]
			prev = s.chain.Next(prev)
			hashes = append(hashes, prev)
			s.widths = append(s.widths, n)
		}
		m.learn(start, s.widths, hashes, known)
	}
	n, err := readTokens(nil, b, left)
	if err != nil {
		return hashes, 0, b, err
	}
	return hashes, tokens, b[n:], nil
}
