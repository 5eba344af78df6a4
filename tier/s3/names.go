// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
)

// metaField is the metadata field that describes an object. In the native layout the name of an object is
//
//	PREFIX XX / KEY    KEY as kv.Key.String writes it, XX the first two digits of its chunk
//
// so that objects are spread over 256 prefixes, since S3 limits the requests per second of a
// prefix. In LMCache's layout it has the name of tier.Name.LMCache.
//
// In both layouts, metaField has the form:
//
//	2.NAMESPACE.SUM.LENGTH.KEY    namespace 32 digits, xxh3 and kv.Key.Digest 16, hexadecimal; length decimal, bytes
//
// An object with an end of its life has 3.NAMESPACE.SUM.LENGTH.KEY.END with decimal seconds since 1970. An encrypted object
// has 4.NAMESPACE.SUM.LENGTH.KEY.END.SEAL: its xxh3 is masked, its length is that of the encrypted bytes, END is 0 if it has none, SEAL
// is the short name of the key, 4 digits; earlier releases do not take it for an object. Objects of earlier releases have
// 1.NAMESPACE.SUM.LENGTH.
const metaField = "x-amz-meta-kvasir"

// label is the content of an object's metadata field.
type label struct {
	namespace kv.Namespace
	sum       uint64
	length    int64
	key       uint64 // digest of the key, if bound
	bound     bool
	end       uint32 // of its life, seconds since 1970; 0: none
	seal      uint16 // short name of the key that encrypted the object; 0: not encrypted
}

func labelOf(k kv.Key, m tier.Meta) label {
	return label{k.Namespace, m.Sum, m.Len, k.Digest(), true, m.End, m.Seal}
}

// of reports whether the label can be that of k's object.
func (l label) of(k kv.Key) bool {
	return l.namespace == k.Namespace && (!l.bound || l.key == k.Digest())
}

func (l label) String() string {
	if !l.bound {
		return fmt.Sprintf("1.%s.%016x.%d", l.namespace, l.sum, l.length)
	}
	text := fmt.Sprintf("%s.%016x.%d.%016x", l.namespace, l.sum, l.length, l.key)
	if l.seal > 0 {
		return fmt.Sprintf("4.%s.%d.%04x", text, l.end, l.seal)
	}
	if l.end > 0 {
		return fmt.Sprintf("3.%s.%d", text, l.end)
	}
	return "2." + text
}

// parseLabel parses the text of String, and accepts no other spelling.
func parseLabel(text string) (l label, ok bool) {
	parts := strings.Split(text, ".")
	if l.bound = len(parts) >= 5 && len(parts) <= 7; len(parts) != 4 && !l.bound {
		return label{}, false
	}
	k, err := kv.ParseKey("kv1/" + parts[1] + "/00000000.00000000/" + strings.Repeat("0", 64))
	if err != nil {
		return label{}, false
	}
	if l.bound {
		if l.key, err = strconv.ParseUint(parts[4], 16, 64); err != nil {
			return label{}, false
		}
	}
	if len(parts) >= 6 {
		end, err := strconv.ParseUint(parts[5], 10, 32)
		if err != nil {
			return label{}, false
		}
		l.end = uint32(end)
	}
	if len(parts) == 7 {
		seal, err := strconv.ParseUint(parts[6], 16, 16)
		if err != nil || seal == 0 {
			return label{}, false
		}
		l.seal = uint16(seal)
	}
	l.namespace = k.Namespace
	if l.sum, err = strconv.ParseUint(parts[2], 16, 64); err != nil {
		return label{}, false
	}
	if l.length, err = strconv.ParseInt(parts[3], 10, 64); err != nil || l.length < 1 || l.String() != text { // refuse other spellings of the label
		return label{}, false
	}
	return l, true
}

// lastLabel is the largest number with which a label of this release begins.
const lastLabel = 4

// isLater reports whether a later release wrote the metadata: they begin with a larger number.
func isLater(text string) bool {
	number, _, ok := strings.Cut(text, ".")
	n, err := strconv.ParseUint(number, 10, 32)
	return ok && err == nil && n > lastLabel
}

// nativeName returns the name of an object in the native layout.
func (t *Tier) nativeName(k kv.Key) string {
	return t.o.Prefix + k.Chunk.String()[:2] + "/" + k.String()
}

// objectName returns the name of an object. It reports false if the name is not known, or is not allowed.
func (t *Tier) objectName(k kv.Key) (string, bool) {
	if t.o.Layout == Native {
		return t.nativeName(k), true
	}
	n, ok := t.o.Names.Of(k.Namespace)
	if !ok {
		return "", false
	}
	name, ok := n.LMCache(k)
	if ok && len(t.o.Prefix)+len(name) > maxName {
		name, ok = n.Digested().LMCache(k)
	}
	if ok = ok && len(t.o.Prefix)+len(name) <= maxName; !ok && t.warned.now("name "+n.Model) {
		t.log.Warn("this model cannot be named in LMCache's layout, so its chunks are not written", "model", n.Model)
	}
	return t.o.Prefix + name, ok
}

// maxName is the largest length of a name in a bucket, in bytes. An object with a longer name gets a digest of its model instead, or is not
// written if its name is too long even so.
const maxName = 1024

// keyOf returns the key of the object with this name in the native layout. It reports false for other objects.
func (t *Tier) keyOf(name string) (kv.Key, bool) {
	inner, ok := strings.CutPrefix(name, t.o.Prefix)
	if !ok || len(inner) < 3 {
		return kv.Key{}, false
	}
	k, err := kv.ParseKey(inner[3:])
	return k, err == nil && t.nativeName(k) == name
}

// path returns the path of an object on its server, escaped.
func path(name string) string { return "/" + aws.Escape(name, true) }

// known returns the Meta of an object of length bytes for a reader of k, from its metadata;
// zero if the object belongs to another key, or its life is over.
func (t *Tier) known(k kv.Key, length int64, meta string) tier.Meta {
	m := t.labelled(k, length, meta)
	if m.Over(time.Now()) {
		return tier.Meta{}
	}
	return m
}

// labelled is known, but also accepts objects whose life is over.
func (t *Tier) labelled(k kv.Key, length int64, meta string) tier.Meta {
	l, ok := parseLabel(meta)
	switch {
	case length <= 0:
		return tier.Meta{}
	case meta == "" && t.o.Layout == LMCache && !t.o.Summed: // an LMCache server wrote it
		return tier.Meta{Len: length, NoSum: true}
	case !ok, !l.of(k), l.length != length: // of another program, a later release or another layout, or torn
		return tier.Meta{}
	}
	return tier.Meta{Len: length, Sum: l.sum, End: l.end, Seal: l.seal}
}
