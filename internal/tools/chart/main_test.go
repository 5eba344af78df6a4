// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const chart = "../../../cmd/kvasir/packaging/chart"

type container struct {
	Name                                        string
	Args                                        []string
	VolumeMounts                                []struct{ Name, MountPath string }
	Resources                                   struct{ Limits struct{ Memory string } }
	StartupProbe, ReadinessProbe, LivenessProbe struct {
		HTTPGet struct{ Path, Port string }
	}
}

// mount returns the volume at a path.
func (c *container) mount(path string) string {
	for _, m := range c.VolumeMounts {
		if m.MountPath == path {
			return m.Name
		}
	}
	return ""
}

type pod struct {
	SecurityContext struct {
		RunAsUser int
	}
	Containers []container
	Volumes    []struct {
		Name     string
		EmptyDir *struct{ Medium, SizeLimit string }
		HostPath *struct{ Path string }
	}
}

// podOf returns the pod that a rendering makes.
func podOf(t *testing.T, documents []document) *pod {
	t.Helper()
	for _, d := range documents {
		if d.Kind == "Deployment" || d.Kind == "DaemonSet" {
			var w struct {
				Spec struct{ Template struct{ Spec pod } }
			}
			var document map[string]any
			if err := yaml.Unmarshal(d.text, &document); err != nil {
				t.Fatal(err)
			}
			text, err := json.Marshal(document) // whose names have no case
			if err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(text, &w); err != nil {
				t.Fatal(err)
			}
			return &w.Spec.Template.Spec
		}
	}
	t.Fatal("there is no pod")
	return nil
}

func kinds(documents []document) (out []string) {
	for _, d := range documents {
		out = append(out, d.Kind)
	}
	slices.Sort(out)
	return out
}

// Server and engine share /dev/shm, the memory limit is the pool and 1 GiB, and kvasir takes the server's flags. KVASIR names the binary.
func TestPods(t *testing.T) {
	binary := os.Getenv("KVASIR")
	f := func(file, form, kind string, gib, user int, path string) {
		t.Helper()
		documents, err := render(chart, filepath.Join("testdata", file), form)
		if err != nil {
			t.Fatal(err)
		}
		if got := kinds(documents); !slices.Contains(got, kind) {
			t.Errorf("%s, %s: %v", file, form, got)
		}
		p := podOf(t, documents)
		server := &p.Containers[0]
		shm := server.mount("/dev/shm")
		if want := strconv.Itoa(gib+1) + "Gi"; server.Resources.Limits.Memory != want || p.SecurityContext.RunAsUser != user || shm == "" {
			t.Errorf("%s, %s: %+v", file, form, p)
		}
		for _, probe := range []string{server.StartupProbe.HTTPGet.Path, server.ReadinessProbe.HTTPGet.Path, server.LivenessProbe.HTTPGet.Path} {
			if probe != "/readyz" {
				t.Errorf("%s, %s: probe %q", file, form, probe)
			}
		}
		for _, c := range p.Containers[1:] {
			if c.mount("/dev/shm") != shm {
				t.Errorf("%s, %s: %s has another /dev/shm", file, form, c.Name)
			}
		}
		for _, v := range p.Volumes {
			if v.Name == shm && (form == "sidecar" && (v.EmptyDir == nil || v.EmptyDir.Medium != "Memory") || form == "daemonset" && (v.HostPath == nil || v.HostPath.Path != path)) {
				t.Errorf("%s, %s: /dev/shm is %+v", file, form, v)
			}
		}
		if !slices.Contains(server.Args, "--http-host=::") { // a cluster may be IPv6 alone
			t.Errorf("%s, %s: %v", file, form, server.Args)
		}
		if form == "daemonset" && (!slices.Contains(server.Args, "--ipc=/run/kvasir/lmcache.sock:5555") || server.mount("/run/kvasir") != "sockets") {
			t.Errorf("%s: no socket: %+v", file, server)
		}
		if binary == "" {
			return
		}
		args := append(slices.Clone(server.Args), "--check-config")
		for i, a := range args { // the secret is not available here
			if strings.HasPrefix(a, "--token-file=") {
				args[i] = "--token-file=" + tokens(t)
			}
		}
		if out, err := exec.Command(binary, args...).CombinedOutput(); err != nil || !strings.Contains(string(out), "l1-size-gb: "+strconv.Itoa(gib)) {
			t.Errorf("%s, %s: kvasir %v: %v: %s", file, form, args, err, out)
		}
	}
	for _, form := range forms {
		kind := map[string]string{"sidecar": "Deployment", "daemonset": "DaemonSet"}[form]
		f("default.yaml", form, kind, 8, 1000, "/dev/shm")
		f("tokens.yaml", form, kind, 64, 1000, "/dev/shm")
		f("bare.yaml", form, kind, 1, 2000, "/mnt/kvasir")
	}
	if binary == "" {
		t.Log("KVASIR names no binary: its flags were not checked")
	}
}

func tokens(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte("me "+strings.Repeat("0", 64)+" read\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// The chart makes the resources that the values ask for, and no others.
func TestKinds(t *testing.T) {
	f := func(file, form string, want ...string) {
		t.Helper()
		documents, err := render(chart, filepath.Join("testdata", file), form)
		if err != nil {
			t.Fatal(err)
		}
		if got := kinds(documents); !slices.Equal(got, want) {
			t.Errorf("%s, %s: %v, want %v", file, form, got, want)
		}
	}
	f("default.yaml", "sidecar", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service")
	f("default.yaml", "daemonset", "DaemonSet", "NetworkPolicy", "Service")
	f("tokens.yaml", "daemonset", "DaemonSet", "NetworkPolicy", "Service", "ServiceMonitor")
	f("bare.yaml", "sidecar", "Deployment", "Service")
}

// The chart refuses values that would make an open or an impossible server, with an explanation.
func TestBadValues(t *testing.T) {
	f := func(want, form, text string) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "values.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := render(chart, file, form); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
	f("pool.gib must be a whole number from 1", "sidecar", "pool: {gib: 0}")
	f("give http.allowFrom or http.tokenSecret", "daemonset", "http: {allowFrom: []}")
}

// The chart names the same release as the code.
func TestVersion(t *testing.T) {
	code, err := os.ReadFile("../../../cmd/kvasir/internal/cli/help.go")
	if err != nil {
		t.Fatal(err)
	}
	_, release, _ := strings.Cut(string(code), "\nconst release = \"")
	release, _, _ = strings.Cut(release, `"`)
	text, err := os.ReadFile(chart + "/Chart.yaml")
	if err != nil || release == "" || !strings.Contains(string(text), "\nappVersion: "+release+"\n") || !strings.Contains(string(text), "\nversion: "+release+"\n") {
		t.Errorf("release %q, %v: %s", release, err, text)
	}
}
