// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode/utf8"
)

// Any body is either a registration within the limits or an answer that is valid
// JSON with a detail, or the bare 500. Texts that Go's decoder takes, ours takes too.
func FuzzRegistration(f *testing.F) {
	for _, s := range []string{
		`{"engine_id":"e1","dp_rank":0,"tp_rank":"1","pp_rank":1.0,"addr":"tcp://10.0.0.7:41233"}`,
		`{"engine_id":"e","dp_rank":true,"tp_rank":0,"pp_rank":0,"addr":"a","tp_size":2,"pp_size":"1","lease_s":2.5}`,
		`{"a":[NaN,-Infinity,1e400,"\ud83d\ude00\ud800",{"b":null}],"a":"` + "\xed\xa0\x80" + `"}`,
		`{"dp_rank":1.5,"tp_rank":"x","pp_rank":99999999999999999999}`, `[1,`, "\xef\xbb\xbf{}", `"\u12`,
	} {
		f.Add([]byte(s), "application/json")
	}
	f.Add([]byte("a=b"), "application/x-www-form-urlencoded")
	f.Fuzz(func(t *testing.T, body []byte, contentType string) {
		in, refused := decodeRegistration(contentType, body)
		if refused == nil {
			if len(in.EngineID) > maxEngineIDBytes || len(in.Addr) > maxAddrBytes || !utf8.ValidString(in.EngineID+in.Addr) ||
				in.TPSize < 0 || in.TPSize > maxSize || in.Lease < 0 || in.Lease > maxLease {
				t.Fatalf("%+v", in)
			}
			again, err := in.body()
			if err != nil {
				t.Fatal(err)
			}
			if same, no := decodeRegistration("application/json", again); no != nil || same != in {
				t.Fatalf("%+v came back as %+v", in, same)
			}
			return
		}
		if (refused.status != 400 && refused.status != 422) || !json.Valid(refused.body) || !bytes.HasPrefix(refused.body, []byte(`{"detail":`)) {
			t.Fatalf("%d %q", refused.status, refused.body)
		}
	})
}

func FuzzDirectory(f *testing.F) {
	f.Add([]byte(`{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://10.0.0.7:41233","1":"x"},"-1":{}}}}`))
	f.Add([]byte(`{"00":{"engine_id":"e","worker_addr":{}}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, body []byte) {
		d, err := parseDirectory(body)
		if err != nil {
			return
		}
		b := []byte{'{'}
		for dp, in := range d {
			if len(b) > 1 {
				b = append(b, ',')
			}
			e := newEngine(in.ID, dp, local)
			for tp, pps := range in.Workers {
				if len(pps) == 0 {
					e.rows = append(e.rows, &row{tp: tp})
				}
				for pp, addr := range pps {
					e.add(&worker{ranks: ranks{tp, pp}, addr: addr})
				}
			}
			b = e.appendJSON(b)
		}
		again, err := parseDirectory(append(b, '}'))
		if err != nil || len(again) != len(d) {
			t.Fatalf("%q: %v", b, err)
		}
		for dp, e := range d {
			if a := again[dp]; a.ID != e.ID || a.TPSize() != e.TPSize() {
				t.Fatalf("%q: %+v, was %+v", b, a, e)
			}
		}
	})
}

func FuzzState(f *testing.F) {
	st := savedState{Generation: 1, Engines: []savedEngine{{ID: "e", Workers: []savedWorker{{Addr: "a"}}}}}
	f.Add(st.encode())
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, doc []byte) {
		var st, again savedState
		if st.decode(doc) != nil {
			return
		}
		if err := again.decode(st.encode()); err != nil || !bytes.Equal(again.encode(), st.encode()) {
			t.Fatalf("%q: %v", doc, err)
		}
	})
}
