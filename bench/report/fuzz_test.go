// SPDX-License-Identifier: Apache-2.0

package report_test

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/report"
)

// Every result that ReadJSON accepts can be printed, compared, written and drawn.
func FuzzResult(f *testing.F) {
	var text bytes.Buffer
	if err := result(6, 1).WriteJSON(&text, true); err != nil {
		f.Fatal(err)
	}
	f.Add(text.Bytes())
	f.Add([]byte(`{"duration":1e308,"completed":1,"total_input_tokens":1,"total_output_tokens":1,"mean_ttft_ms":5,"p-1_ttft_ms":3,"_ttft_ms":1,"latencies":[1e308],
		"ttfts":[1e308],"itls":[[1e308,1e308]],"input_lens":[9223372036854775807],"output_lens":[1],"start_times":[-1e308],"errors":[""]}`))
	if vllm, err := os.ReadFile(filepath.Join("..", "testdata", "failed.json")); err == nil {
		f.Add(vllm)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := bench.ReadJSON(bytes.NewReader(text))
		if err != nil {
			return
		}
		for _, err := range []error{
			r.Table(io.Discard, nil), r.More(io.Discard), r.WriteJSON(io.Discard, true), r.WriteAIPerf(io.Discard),
			bench.WriteRatios(io.Discard, bench.Compare(r, r)), report.Write(io.Discard, []report.Run{{Name: "a", Result: r}, {Name: "b", Result: r}}),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}
