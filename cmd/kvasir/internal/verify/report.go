// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"text/tabwriter"

	"github.com/kvasir-kv/kvasir/internal/safelog"
)

// ExitCode returns the exit code of the command: 0 if restored KV was right, 1 if it was not, and 3 if no restored KV could be tested.
func (r *Report) ExitCode() int {
	switch r.Verdict {
	case Passed:
		return 0
	case Failed:
		return 1
	}
	return 3
}

// mostDifferences is how many differences of a step the text for people shows; the report as JSON or HTML has all of them.
const mostDifferences = 5

// Write writes the report as text for people.
func (r *Report) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, s := range r.Steps {
		fmt.Fprintf(t, "%s\t%s\t%s\n", s.Status, s.Name, s.summary())
		for _, d := range s.Differences[:min(len(s.Differences), mostDifferences)] {
			fmt.Fprintf(t, "\t  %s\t\n", d.text())
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if r.Left != "" {
		fmt.Fprintln(w, safelog.Text(r.Left, safelog.MaxText))
	}
	_, err := fmt.Fprintf(w, "verdict: %s\n", r.Verdict)
	return err
}

func (s *Step) summary() string {
	switch {
	case s.Why != "":
		return safelog.Text(s.Why, safelog.MaxText)
	case s.Cached > 0:
		return fmt.Sprintf("%d prompts, %d tokens restored, log-probabilities within %.4f of %.4f", s.Prompts, s.Cached, s.Worst, s.Tolerance)
	}
	return fmt.Sprintf("%d prompts", s.Prompts)
}

func (d *Difference) text() string {
	at := fmt.Sprintf("prompt %d, token %d: ", d.Prompt, d.Token)
	if d.Token < 0 {
		at = fmt.Sprintf("prompt %d: ", d.Prompt)
	}
	return safelog.Text(fmt.Sprintf("%s%s (computed %s, restored %s)", at, d.What, d.Want, d.Got), safelog.MaxText)
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error { return json.NewEncoder(w).Encode(r) }

var htmlPage = template.Must(template.New("").Parse(`<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>kvasir verify: {{.Verdict}}</title>
<style>body{font:15px sans-serif;max-width:70em;margin:2em auto}td,th{padding:.3em .8em;text-align:left;vertical-align:top}
.passed{color:#070}.failed{color:#b00;font-weight:bold}pre{white-space:pre-wrap;margin:0}</style>
<h1>kvasir verify: {{.Verdict}}</h1>
<p>{{.URL}}, model {{.Model}}, {{.Time}}. Cold runs differ by {{printf "%.4f" .Noise}} at most. {{.Left}}</p>
<table><tr><th>status<th>step<th>tokens restored<th>largest difference<th>tolerance<th>what differed
{{range .Steps}}<tr><td class="{{.Status}}">{{.Status}}<td>{{.Name}}<td>{{.Cached}}<td>{{printf "%.4f" .Worst}}<td>{{printf "%.4f" .Tolerance}}<td>{{.Why}}
{{range .Differences}}<pre>prompt {{.Prompt}}, token {{.Token}}: {{.What}}
computed: {{.Want}}
restored: {{.Got}}</pre>{{end}}
{{end}}</table></html>
`))

// WriteHTML writes the report as a page of HTML.
func (r *Report) WriteHTML(w io.Writer) error { return htmlPage.Execute(w, r) }
