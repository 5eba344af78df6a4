// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// tree writes a repository.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

var small = map[string]string{
	"README.md":                         "# A\n[b](docs/start/b.md#two-words) [licence](LICENSE) [folder](docs) <http://127.0.0.1:8080/>\n",
	"LICENSE":                           "free\n",
	"docs/README.md":                    "# Documents\n[words](words.md)\n## Start\n* [b.md](start/b.md): b\n## Reference\n* [commands](reference/commands/README.md): c\n",
	"docs/start/b.md":                   "# B: a page\n<!-- not typed: needs root -->\n```sh\nls <x> & y\n```\n## Two words\n## Two words\n<a id=\"here\"></a>![p](p.png) [x](#two-words-1) [y](b.md#here) [z](../reference/commands/x.md)\n",
	"docs/words.md":                     "# Words\n",
	"docs/start/p.png":                  "png",
	"docs/reference/commands/README.md": "# Commands\n",
	"docs/reference/commands/x.md":      "# kvasir x\n| a | b |\n| --- | --- |\n| 1 | 2 |\n",
}

func read(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		out[name] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Links between pages become links between pages of the site, files are copied, marks for tests are left out, the order is the index's.
func TestSite(t *testing.T) {
	out := filepath.Join(t.TempDir(), "site")
	if err := build(tree(t, small), out); err != nil {
		t.Fatal(err)
	}
	got := read(t, out)
	f := func(file string, wants ...string) {
		t.Helper()
		for _, want := range wants {
			if !strings.Contains(got[file], want) {
				t.Errorf("%s lacks %s:\n%s", file, want, got[file])
			}
		}
	}
	f("index.html", `href="start/b.html#two-words"`, `href="files/LICENSE"`, `<a>folder</a>`, `rel="next" href="contents.html"`)
	f("start/b.html", `href="#two-words-1"`, `href="#here"`, `src="../files/start/p.png"`, `href="../reference/commands/x.html"`, `ls &lt;x&gt; &amp; y`,
		`rel="prev" href="../words.html"`, `rel="next" href="../reference/commands/index.html"`, `aria-current="page">B</a>`)
	f("reference/commands/x.html", `<div class="table"><table>`)
	f("files/LICENSE", "free")
	f("site.js", `"u":"start/b.html#two-words-1"`)
	if strings.Contains(got["start/b.html"], "not typed") {
		t.Error("a mark for tests is shown")
	}
}

func TestLinksThatLeadNowhereAreErrors(t *testing.T) {
	f := func(link, want string) {
		t.Helper()
		files := map[string]string{"docs/README.md": "# D\n", "README.md": "# A\n[x](" + link + ")\n"}
		if err := build(tree(t, files), filepath.Join(t.TempDir(), "site")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", link, err, want)
		}
	}
	f("docs/none.md", "docs/none.md leads nowhere")
	f("docs/README.md#none", `no heading "none"`)
	f("#none", `no heading "none"`)
	f("../outside", "leads nowhere")
}

// The tool leaves a folder alone that is not a site.
func TestForeignFolderIsLeftAlone(t *testing.T) {
	out := tree(t, map[string]string{"mine.txt": "x"})
	if err := build(tree(t, small), out); err == nil || !strings.Contains(err.Error(), "is no site") {
		t.Errorf("%v", err)
	}
	if text, err := os.ReadFile(filepath.Join(out, "mine.txt")); err != nil || string(text) != "x" {
		t.Errorf("%q, %v", text, err)
	}
}

var requests = regexp.MustCompile(`(?i)(?:src|srcset|data-src)="?https?:|<link[^>]*href="?https?:|url\(\s*['"]?https?:|@import|fetch\(|XMLHttpRequest|<iframe|<base`)

// The site of this repository has equal bytes at each run and each page in the order. A browser requests nothing for it from other hosts.
func TestThisRepository(t *testing.T) {
	const root = "../../.."
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	for _, out := range []string{one, two, two} { // twice into one folder
		if err := build(root, out); err != nil {
			t.Fatal(err)
		}
	}
	a, b := read(t, one), read(t, two)
	if len(a) != len(b) || len(a) < 100 {
		t.Fatalf("%d and %d files", len(a), len(b))
	}
	for name, text := range a {
		if !bytes.Equal([]byte(text), []byte(b[name])) {
			t.Errorf("%s differs", name)
		}
		if name != "site.js" && !strings.HasPrefix(name, "files/") {
			if m := requests.FindString(text); m != "" {
				t.Errorf("%s asks another host: %s", name, m)
			}
		}
	}
	script, err := assets.ReadFile("assets/site.js")
	if err != nil || requests.Match(script) {
		t.Errorf("the script asks another host: %v", err)
	}
}
