// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/server/admin"
)

var (
	metricName = regexp.MustCompile(`\b(?:kvasir|lmcache_mp)_\w+`)
	grouped    = regexp.MustCompile(`by \(([^)]*)\) \(`)
	legend     = regexp.MustCompile(`\{\{(\w+)\}\}`)
)

// The dashboard of docs/reference/grafana.json asks only for series that are there, by labels that they have.
func TestGrafanaDashboard(t *testing.T) {
	text, err := os.ReadFile("../../docs/reference/grafana.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Type, Title string
			ID          int
			Targets     []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	_, page := ask(admin.Handler(newServerWithTier(t), admin.Options{}), "GET", "http://localhost/metrics", "")
	have := seriesOf(page)
	exprs, ids := 0, map[int]bool{}
	for _, p := range board.Panels {
		if p.Title == "" || ids[p.ID] || p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %d, %q: no title, an id of another one, or nothing to show", p.ID, p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			exprs++
			names := metricName.FindAllString(target.Expr, -1)
			if len(names) == 0 {
				t.Errorf("%s asks for no metric: %s", p.Title, target.Expr)
			}
			var labels []string
			for _, m := range grouped.FindAllStringSubmatch(target.Expr, -1) {
				for _, l := range strings.Split(m[1], ",") {
					if l = strings.TrimSpace(l); l != "le" && !slices.Contains(labels, l) {
						labels = append(labels, l)
					}
				}
			}
			for _, name := range names {
				spec, ok := have[name]
				if !ok {
					base := strings.TrimSuffix(name, "_bucket")
					if spec, ok = have[base], strings.HasPrefix(have[base], "histogram"); !ok {
						t.Errorf("%s: there is no %s", p.Title, name)
						continue
					}
				}
				kind, _, _ := strings.Cut(spec, " ")
				if strings.Contains(target.Expr, "rate("+name) != (kind != "gauge") && !strings.Contains(p.Title, "Bugs") {
					t.Errorf("%s: rates are of counters: %s is a %s", p.Title, name, kind)
				}
				for _, l := range labels {
					if !slices.Contains(strings.Fields(spec)[1:], l) {
						t.Errorf("%s: %s has no label %s", p.Title, name, l)
					}
				}
			}
			for _, m := range legend.FindAllStringSubmatch(target.LegendFormat, -1) {
				if !slices.Contains(labels, m[1]) {
					t.Errorf("%s: the legend names %s, by which nothing is grouped", p.Title, m[1])
				}
			}
		}
	}
	if exprs < 30 {
		t.Errorf("only %d queries", exprs)
	}
}
