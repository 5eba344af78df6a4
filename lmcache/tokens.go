// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/kv"
)

// errToken means that a token list holds something else than integers of 0 to
// 2^32-1, or ends early.
var errToken = errors.New("lmcache: a token id is no integer from 0 to 2^32-1, or the list of tokens ends early")

// tokenForm says how to read a token from the eight bytes that begin with its msgpack type byte: (word >> shift) & mask. The token takes
// width bytes. A width of 0 marks a type byte that slowToken reads instead of the fast loop.
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

// tokenWidths has the width of each tokenForm, in a table of four cache lines.
var tokenWidths = func() (t [256]uint8) {
	for c, f := range tokenForms {
		t[c] = f.width
	}
	return t
}()

// readTokens decodes n tokens from b into dst, 4 bytes each, big-endian, and
// returns the number of bytes read.
func readTokens(dst, b []byte, n int) (int, error) {
	p := 0
	for i := range n {
		if len(b)-p >= 8 {
			word := binary.BigEndian.Uint64(b[p:])
			if f := tokenForms[byte(word>>56)]; f.width != 0 {
				binary.BigEndian.PutUint32(dst[4*i:], uint32(word>>f.shift)&f.mask)
				p += int(f.width)
				continue
			}
		}
		v, width, err := slowToken(b[p:])
		if err != nil {
			return p, err
		}
		binary.BigEndian.PutUint32(dst[4*i:], v)
		p += width
	}
	return p, nil
}

// skipTokens checks n tokens at the start of b and returns how many bytes they take. The end of a token decides where the next begins, so
// latency bounds the loop. It therefore takes two tokens from each load, as long as two tokens of the widest form (5 bytes) fit into the
// rest. A long list goes through skipInLanes first.
func skipTokens(b []byte, n int) (int, error) {
	p := 0
	if n >= laneTokens {
		skipped, count := skipInLanes(b, n)
		p, n = skipped, n-count
	}
	for n > 0 {
		if n > 1 && len(b)-p >= 10 {
			word := binary.LittleEndian.Uint64(b[p:])
			one := tokenWidths[byte(word)]
			two := tokenWidths[byte(word>>(8*one&63))]
			if one != 0 && two != 0 {
				p += int(one) + int(two)
				n -= 2
				continue
			}
		}
		_, width, err := slowToken(b[p:])
		if err != nil {
			return p, err
		}
		p += width
		n--
	}
	return p, nil
}

const (
	laneTokens = 1024 // lists of fewer tokens are not worth the lanes
	laneSettle = 24   // tokens after which a lane that began inside of one nearly always meets the ends of the others
	laneTail   = 512  // bytes at the end of a frame where other fields may be
)

// skipInLanes checks the first tokens of a list of n tokens. It returns how many bytes and tokens it checked. skipTokens checks the rest.
//
// Four lanes go through a quarter of b each, so that four loads run at the same time instead of one. Each lane but the first begins at a
// guess of where a token begins: laneSettle tokens after an arbitrary byte. The tokens of a lane count only if the lane before it ends at
// exactly the byte where this lane began. That byte is then the end of a token, so both lanes agree with the plain loop.
func skipInLanes(b []byte, n int) (skipped, tokens int) {
	b = b[:min(len(b), 5*n+laneTail)] // what follows the list may be long
	quarter := (len(b) - laneTail) / 4
	if quarter < laneTail {
		return 0, 0
	}
	var p, end, count [4]int // of each lane: its next token, the end of the lane, its tokens
	for i := 1; i < len(p); i++ {
		p[i] = i * quarter
		for range laneSettle {
			p[i] += max(int(tokenWidths[b[p[i]]]), 1)
		}
	}
	copy(end[:], p[1:])
	end[3] = len(b) - laneTail
	starts := p

	p0, p1, p2, p3 := p[0], p[1], p[2], p[3]
	together := 0
	for together < n && p0 < end[0] && p1 < end[1] && p2 < end[2] && p3 < end[3] {
		w0, w1, w2, w3 := tokenWidths[b[p0]], tokenWidths[b[p1]], tokenWidths[b[p2]], tokenWidths[b[p3]]
		if w0 == 0 || w1 == 0 || w2 == 0 || w3 == 0 {
			break
		}
		p0, p1, p2, p3 = p0+int(w0), p1+int(w1), p2+int(w2), p3+int(w3)
		together++
	}
	p = [4]int{p0, p1, p2, p3}
	for i := range p {
		for count[i] = together; p[i] < end[i] && tokens+count[i] < n; count[i]++ {
			width := tokenWidths[b[p[i]]]
			if width == 0 {
				break
			}
			p[i] += int(width)
		}
		if starts[i] != skipped || tokens+count[i] > n {
			break
		}
		skipped, tokens = p[i], tokens+count[i]
	}
	return skipped, tokens
}

// slowToken reads one token near the end of the frame, or one in a wider form than its value needs.
func slowToken(b []byte) (uint32, int, error) {
	if t := msgp.NextType(b); t != msgp.IntType && t != msgp.UintType {
		return 0, 0, errToken
	}
	v, rest, err := msgp.ReadInt64Bytes(b)
	if err != nil || v < 0 || v > 0xffffffff {
		return 0, 0, errToken
	}
	return uint32(v), len(b) - len(rest), nil
}

// AppendTokens appends tokens as a msgpack array of shortest-form integers.
func AppendTokens(b []byte, tokens []uint32) []byte {
	return appendTokens(msgp.AppendArrayHeader(b, uint32(len(tokens))), tokens)
}

// AppendPackedTokens appends tokens as a bin value of four bytes each, big-endian.
func AppendPackedTokens(b []byte, tokens []uint32) []byte {
	b = msgp.AppendBytesHeader(b, uint32(4*len(tokens)))
	for _, t := range tokens {
		b = binary.BigEndian.AppendUint32(b, t)
	}
	return b
}

func appendTokens(b []byte, tokens []uint32) []byte {
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

// readKeyTokens reads an encoded token list, header included. It looks up the hashes of the chunks that the Memo remembers, checks the
// other tokens, and leaves their hashes to Hash. It returns the bytes after the list.
func (m *Memo) readKeyTokens(b []byte, k *KeyView) (rest []byte, err error) {
	n, b, err := readArray(b)
	if err != nil {
		return b, err
	}
	k.NumTokens, k.Chunks, k.tokens = n, n/m.chunkTokens, b
	k.Hashes, k.ends = k.Hashes[:0], k.ends[:0]
	b = m.known(b, k.Chunks, k)
	k.unhashed = b
	skipped, err := skipTokens(b, n-len(k.Hashes)*m.chunkTokens)
	if err != nil {
		return b, err
	}
	return b[skipped:], nil
}

// readPackedTokens reads the tokens of a key of 0.5.7, four bytes each, big-endian. Chunks are hashed straight
// from the frame.
func (m *Memo) readPackedTokens(b []byte, k *KeyView) (rest []byte, err error) {
	text, rest, err := msgp.ReadBytesZC(b)
	if err != nil {
		return b, err
	}
	if len(text)%4 != 0 {
		return b, fmt.Errorf("lmcache: %d bytes are no whole number of tokens of 4 bytes", len(text))
	}
	k.Packed = true
	k.NumTokens, k.Chunks, k.tokens = len(text)/4, len(text)/4/m.chunkTokens, text
	k.Hashes, k.ends = k.Hashes[:0], k.ends[:0]
	if k.unhashed = text; !k.unasked {
		k.unhashed = m.known(text, k.Chunks, k)
	}
	return rest, nil
}

// Hash extends k.Hashes to the first n chunks of the key's token list, or to all chunks if there are fewer. k must come from DecodeKey of
// m, and its frame must be unchanged.
func (m *Memo) Hash(k *KeyView, n int) {
	n = min(n, k.Chunks)
	known := len(k.Hashes)
	if known >= n {
		return
	}
	s := m.scratch.Get().(*memoScratch)
	defer m.scratch.Put(s)
	s.widths = s.widths[:0]
	prev := kv.Seed
	if known > 0 {
		prev = k.Hashes[known-1]
	}
	start := k.unhashed
	for range n - known {
		width := 4 * m.chunkTokens
		if k.Packed {
			copy(s.chain.Tokens(), k.unhashed)
		} else {
			var err error
			if width, err = readTokens(s.chain.Tokens(), k.unhashed, m.chunkTokens); err != nil {
				panic("BUG: lmcache: a token list that was checked does not decode")
			}
		}
		k.unhashed = k.unhashed[width:]
		prev = s.chain.Next(prev)
		k.Hashes, k.ends = append(k.Hashes, prev), append(k.ends, len(k.tokens)-len(k.unhashed))
		s.widths = append(s.widths, width)
	}
	m.learn(start, s.widths, k, known)
}

// Tokens returns the tokens of the chunks in k.Hashes as msgpack integers. text[:ends[0]] is the first chunk, and chunk i ends at ends[i];
// head and a chunk together are a msgpack array. The integers are as the client wrote them, unless the tokens are packed or a chunk takes
// more than 5 bytes per token. The results may alias k and its frame. k must come from DecodeKey of m, and its frame must be unchanged.
func (m *Memo) Tokens(k *KeyView) (head, text []byte, ends []int) {
	from := 0
	for _, end := range k.ends {
		if k.Packed || end-from > 5*m.chunkTokens {
			text, ends = m.narrow(k)
			return m.head, text, ends
		}
		from = end
	}
	return m.head, k.tokens[:from], k.ends
}

// narrow returns the tokens of the chunks in k.Hashes in their shortest forms.
func (m *Memo) narrow(k *KeyView) (text []byte, ends []int) {
	raw, from := make([]byte, 4*m.chunkTokens), 0
	tokens := make([]uint32, m.chunkTokens)
	for _, end := range k.ends {
		if k.Packed {
			raw = k.tokens[from:end]
		} else if _, err := readTokens(raw, k.tokens[from:], m.chunkTokens); err != nil {
			panic("BUG: lmcache: a token list that was checked does not decode")
		}
		for t := range tokens {
			tokens[t] = binary.BigEndian.Uint32(raw[4*t:])
		}
		text = appendTokens(text, tokens)
		ends, from = append(ends, len(text)), end
	}
	return text, ends
}

// AppendTokens appends the tokens of whole chunks to dst, from chunk number `chunk` on, `most` tokens at most. It first hashes the chunks
// before that one if they have no hash yet. k must come from DecodeKey of m, and its frame must be unchanged.
func (m *Memo) AppendTokens(dst []uint32, k *KeyView, chunk, most int) []uint32 {
	n := min(most, (k.Chunks-chunk)*m.chunkTokens)
	if chunk < 0 || n <= 0 {
		return dst
	}
	m.Hash(k, chunk)
	b := k.tokens
	if chunk > 0 {
		b = b[k.ends[chunk-1]:]
	}
	at := len(dst)
	dst = slices.Grow(dst, n)[:at+n]
	for i := range dst[at:] {
		switch {
		case k.Packed:
			dst[at+i], b = binary.BigEndian.Uint32(b), b[4:]
			continue
		case len(b) >= 8:
			word := binary.BigEndian.Uint64(b)
			if f := tokenForms[byte(word>>56)]; f.width != 0 {
				dst[at+i], b = uint32(word>>f.shift)&f.mask, b[f.width:]
				continue
			}
		}
		v, width, err := slowToken(b)
		if err != nil {
			panic("BUG: lmcache: a token list that was checked does not decode")
		}
		dst[at+i], b = v, b[width:]
	}
	return dst
}
