// SPDX-License-Identifier: Apache-2.0

package api

import (
	"hash/fnv"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

// There is no model, and so no vocabulary: a text becomes tokens piece by piece. A piece is a word with the blank before it, or one
// other character. Generated tokens are written as words that name the tokens, so that an answer that comes back in the next turn
// becomes the same tokens again.

// mark begins the word of a generated token: " ~", then the token's number in base 36.
const mark = " ~"

// tokenText returns the text of generated tokens.
func tokenText(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteString(mark)
		b.WriteString(strconv.FormatUint(uint64(t), 36))
	}
	return b.String()
}

// tokenize returns the tokens of a text.
func tokenize(text string) []uint32 {
	var out []uint32
	for len(text) > 0 {
		n := pieceLen(text)
		out = append(out, tokenOf(text[:n]))
		text = text[n:]
	}
	return out
}

func wordRune(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }

// pieceLen returns the length in bytes of the first piece of text, which must not be empty.
func pieceLen(text string) int {
	at := 0
	if strings.HasPrefix(text, mark) {
		at = len(mark)
	} else if text[0] == ' ' {
		at = 1
	}
	n := strings.IndexFunc(text[at:], func(r rune) bool { return !wordRune(r) })
	switch {
	case n < 0:
		return len(text)
	case n > 0:
		return at + n
	case at > 0:
		return 1
	}
	_, size := utf8.DecodeRuneInString(text)
	return size
}

func tokenOf(piece string) uint32 {
	if name, ok := strings.CutPrefix(piece, mark); ok {
		if t, err := strconv.ParseUint(name, 36, 32); err == nil && t < workload.Vocabulary && strconv.FormatUint(t, 36) == name {
			return uint32(t)
		}
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(piece)) // never fails
	return h.Sum32() % workload.Vocabulary
}

// chatText returns a conversation as the model gets it: roles, contents, and the beginning of the answer.
func chatText(messages []message) string {
	var b strings.Builder
	for _, m := range messages {
		b.WriteString("<|" + m.Role + "|>\n" + m.text() + "\n")
	}
	b.WriteString("<|assistant|>\n")
	return b.String()
}
