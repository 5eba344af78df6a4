// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kvasir-kv/kvasir/server/admin"
)

// The alert rules ask only for series that are there, and speak of labels that they have.
func TestAlertRules(t *testing.T) {
	text, err := os.ReadFile("../../docs/reference/prometheus-rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	_, page := ask(admin.Handler(newServerWithTier(t), admin.Options{}), "GET", "http://localhost/metrics", "")
	have := seriesOf(page)
	label := regexp.MustCompile(`\$labels\.(\w+)`)
	rules := 0
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			rules++
			if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["do"] == "" {
				t.Errorf("%s: want a severity, a summary and what to do", r.Alert)
			}
			labels := []string{"instance", "job"} // Prometheus' own
			names := metricName.FindAllString(r.Expr, -1)
			if len(names) == 0 && !strings.HasPrefix(r.Expr, "up{") {
				t.Errorf("%s asks for no metric: %s", r.Alert, r.Expr)
			}
			for _, name := range names {
				spec, ok := have[name]
				if !ok {
					t.Errorf("%s: there is no %s", r.Alert, name)
					continue
				}
				kind, _, _ := strings.Cut(spec, " ")
				if strings.Contains(r.Expr, "increase("+name) != (kind == "counter") {
					t.Errorf("%s: increases are of counters: %s is a %s", r.Alert, name, kind)
				}
				labels = append(labels, strings.Fields(spec)[1:]...)
			}
			for _, m := range label.FindAllStringSubmatch(r.Annotations["summary"]+r.Annotations["do"], -1) {
				if !slices.Contains(labels, m[1]) {
					t.Errorf("%s speaks of the label %s, which its series lack", r.Alert, m[1])
				}
			}
		}
	}
	if rules < 5 {
		t.Errorf("only %d rules", rules)
	}
}
