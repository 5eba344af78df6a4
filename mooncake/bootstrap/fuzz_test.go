package bootstrap

import (
	"bufio"
	"bytes"
	"encoding/json"
	"math"
	"net/http"
	"strings"
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
		in, refused, ok := decodeRegistration(contentType, body)
		if ok {
			if len(in.EngineID) > MaxEngineIDBytes || len(in.Addr) > MaxAddrBytes || !utf8.ValidString(in.EngineID+in.Addr) ||
				in.TPSize < 0 || in.TPSize > MaxSize || in.Lease < 0 || in.Lease > MaxLease {
				t.Fatalf("%+v", in)
			}
			again, err := in.body()
			if err != nil {
				t.Fatal(err)
			}
			if same, _, ok := decodeRegistration("application/json", again); !ok || same != in {
				t.Fatalf("%+v came back as %+v", in, same)
			}
			return
		}
		switch {
		case refused.status == 500 && string(refused.body) == "Internal Server Error":
		case refused.status != 400 && refused.status != 422, !json.Valid(refused.body), !bytes.HasPrefix(refused.body, []byte(`{"detail":`)):
			t.Fatalf("%d %q", refused.status, refused.body)
		}
		if json.Valid(body) && utf8.Valid(body) && !bytes.HasPrefix(body, []byte("\xef\xbb\xbf")) {
			if _, err := parseJSON(body); err != nil && err != errUnreadable {
				t.Fatalf("%q: %v", body, err)
			}
		}
	})
}

// What our parser reads and writes, Go's decoder reads as the same value.
func FuzzJSON(f *testing.F) {
	f.Add(`{"a":[1,-0,2.5,-0.0,1e22,"é\n\u0001😀",null,true,{"":{}}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		v, err := parseJSON([]byte(text))
		if err != nil {
			return
		}
		out, err := appendJSON(nil, &v)
		if err != nil {
			return
		}
		var want, got any
		if json.Unmarshal([]byte(strings.TrimPrefix(text, "\ufeff")), &want) != nil {
			return // an integer too large for a float64, or NaN's like
		}
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("%q: %v", out, err)
		}
		a, _ := json.Marshal(withoutMinusZero(want))
		b, _ := json.Marshal(withoutMinusZero(got))
		if !bytes.Equal(a, b) {
			t.Fatalf("%q became %q", text, out)
		}
	})
}

// withoutMinusZero makes -0 into 0, as Python does with integers.
func withoutMinusZero(v any) any {
	switch v := v.(type) {
	case float64:
		return v + 0
	case []any:
		for i := range v {
			v[i] = withoutMinusZero(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = withoutMinusZero(v[k])
		}
	}
	return v
}

// What the front answers itself is to net/http a plain GET /query without a body
// on a connection that stays open.
func FuzzPlainQuery(f *testing.F) {
	f.Add(getRequest("/query"))
	f.Add([]byte("GET /query HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"))
	f.Add([]byte("GET /query HTTP/1.1\r\nHost : a\r\n b\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		size, plain := plainQuery(b)
		if size == 0 || !plain {
			return
		}
		in := bufio.NewReader(bytes.NewReader(b[:size]))
		req, err := http.ReadRequest(in)
		if err != nil || req.Method != "GET" || req.RequestURI != "/query" || req.ContentLength != 0 || req.Close || req.ProtoMinor != 1 ||
			len(req.TransferEncoding) != 0 || req.Header.Get("Expect") != "" || req.Header.Get("Upgrade") != "" || in.Buffered() != 0 {
			t.Fatalf("%q: %+v, %v", b[:size], req, err)
		}
	})
}

func FuzzDirectory(f *testing.F) {
	f.Add([]byte(`{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://10.0.0.7:41233","1":"x"},"-1":{}}}}`))
	f.Add([]byte(`{"00":{"engine_id":"e","worker_addr":{}}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, body []byte) {
		d, err := ParseDirectory(body)
		if err != nil {
			return
		}
		b := []byte{'{'}
		for dp, in := range d {
			if len(b) > 1 {
				b = append(b, ',')
			}
			e := newEngine(in.ID, dp)
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
		again, err := ParseDirectory(append(b, '}'))
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
	b, err := encodeState(savedState{Generation: 1, Engines: []savedEngine{{ID: "e", Workers: []savedWorker{{Addr: "a"}}}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(stateMagic + "00000000\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		st, reason := decodeState(b)
		if reason == "" && st.check("x", math.MaxInt) == nil {
			if _, err := encodeState(st); err != nil {
				t.Fatal(err)
			}
		}
	})
}
