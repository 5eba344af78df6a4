// SPDX-License-Identifier: Apache-2.0

// Command chart renders the Helm chart in cmd/kvasir/packaging as helm template does, so that other programs can check the objects.
//
//	chart CHART FOLDER VALUES.yaml ...   writes FOLDER/VALUES-FORM-KIND.yaml for both forms
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
)

var forms = []string{"sidecar", "daemonset"}

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "usage: chart CHART FOLDER VALUES.yaml ...")
		os.Exit(2)
	}
	if err := writeAll(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, "chart:", err)
		os.Exit(1)
	}
}

func writeAll(chart, folder string, files []string) error {
	for _, file := range files {
		for _, form := range forms {
			documents, err := render(chart, file, form)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", file, form, err)
			}
			for _, d := range documents {
				name := strings.TrimSuffix(filepath.Base(file), ".yaml") + "-" + form + "-" + d.Kind + ".yaml"
				if err := os.WriteFile(filepath.Join(folder, name), d.text, 0o644); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// A document is one object that the chart creates.
type document struct {
	Kind string
	text []byte
}

// render returns the objects of a chart in one form, with the values in a file.
func render(chart, file, form string) (documents []document, err error) {
	c, err := loader.Load(chart)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	values := map[string]any{}
	if err := yaml.Unmarshal(text, &values); err != nil {
		return nil, err
	}
	values["form"] = form
	all, err := util.ToRenderValues(c, values, common.ReleaseOptions{Name: "test", Namespace: "default", IsInstall: true, Revision: 1}, common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	rendered, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	for name, text := range rendered {
		if filepath.Ext(name) != ".yaml" {
			continue
		}
		for part := range strings.SplitSeq(text, "\n---\n") {
			if strings.TrimSpace(part) == "" {
				continue
			}
			d := document{text: []byte(part)}
			if err := yaml.Unmarshal(d.text, &d); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			documents = append(documents, d)
		}
	}
	return documents, nil
}
