// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"encoding/xml"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Documents of a store, or of another server in its place: the tier takes only names from a list that it would write itself, and
// reads only a refusal that the document contains.
func FuzzDocument(f *testing.F) {
	native := &Tier{o: Options{Prefix: "kvasir/"}}
	shared := &Tier{o: Options{Prefix: "p/", Layout: LMCache}}
	name := native.nativeName(kv.Key{Namespace: kv.Namespace{1}, Chunk: kv.Hash{2}, Rank: 3, Group: 4})
	f.Add([]byte("<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken><EncodingType>url</EncodingType><Contents><Key>" + strings.ReplaceAll(name, "/", "%2F") + "</Key><Size>5</Size><LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents></ListBucketResult>"))
	f.Add([]byte("<ListBucketResult><Contents><Key>p/m@00000000@0@" + strings.Repeat("0", 64) + "</Key><Size>-1</Size></Contents></ListBucketResult>"))
	f.Add([]byte("<Error><Code>SlowDown</Code><Message>reduce</Message><Region>eu-1</Region></Error>"))
	f.Add([]byte("<html>"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p page
		if xml.Unmarshal(b, &p) == nil {
			p.decode()
			for _, c := range p.Contents {
				if k, ok := native.keyOf(c.Key); ok && native.nativeName(k) != c.Key {
					t.Errorf("%q is %+v", c.Key, k)
				}
				content, ok := shared.contentOf(c.Key)
				if !ok {
					continue
				}
				if n, k, ok := tier.ParseLMCache(strings.TrimPrefix(c.Key, "p/")); !ok || n.Model != content.Model || k != content.Key {
					t.Errorf("%q is %+v", c.Key, content)
				}
			}
		}
		e := &Error{Region: "was"}
		e.read(b)
		if e.unknownDocument && (e.Code != "" || e.Message != "" || e.Region != "was") {
			t.Errorf("%+v of a document that is unknown", e)
		}
		if len(e.Code)+len(e.Message) > len(b) {
			t.Errorf("%+v of %d bytes", e, len(b))
		}
	})
}
