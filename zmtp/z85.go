// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"encoding/binary"
	"errors"
	"strings"
)

// letters are the digits of Z85 (RFC 32 of ZeroMQ).
const letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

// Z85 returns a key as 40 letters, the form that ZeroMQ's programs write and read. A secret key must not be logged.
func (k Key) Z85() string {
	var b strings.Builder
	for i := 0; i < len(k); i += 4 {
		v, word := binary.BigEndian.Uint32(k[i:]), [5]byte{}
		for j := 4; j >= 0; j-- {
			word[j] = letters[v%85]
			v /= 85
		}
		_, _ = b.Write(word[:]) // never fails
	}
	return b.String()
}

// errKey means that a text is not a key. It does not repeat the text, which may be a secret.
var errKey = errors.New("zmtp: a key must be 40 letters of Z85")

// ParseKey parses a key of 40 letters of Z85.
func ParseKey(text string) (k Key, err error) {
	if len(text) != 40 {
		return k, errKey
	}
	for i := 0; i < len(text); i += 5 {
		v := uint64(0)
		for j := range 5 {
			d := strings.IndexByte(letters, text[i+j])
			if d < 0 {
				return k, errKey
			}
			v = v*85 + uint64(d)
		}
		if v > 1<<32-1 {
			return k, errKey
		}
		binary.BigEndian.PutUint32(k[i/5*4:], uint32(v))
	}
	return k, nil
}
