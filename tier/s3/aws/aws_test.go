// SPDX-License-Identifier: Apache-2.0

package aws_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Signatures are those of the examples in Amazon's documentation of S3 ("Authenticating
// Requests: Using the Authorization Header").
func TestSign(t *testing.T) {
	const empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	s := aws.Signer{Service: "s3", Region: "us-east-1"}
	c := aws.Credentials{ID: "AKIAIOSFODNN7EXAMPLE", Secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}
	now := time.Date(2013, 5, 24, 0, 0, 0, 0, time.UTC)
	f := func(want string, r aws.Request) {
		t.Helper()
		r.Host = "examplebucket.s3.amazonaws.com"
		fields := s.Sign(&r, c, now)
		last := fields[len(fields)-1]
		if last.Name != "authorization" || !strings.HasSuffix(last.Value, "Signature="+want) {
			t.Errorf("%s %s?%s: %v", r.Method, r.Path, r.Query, last)
		}
	}
	f("f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41", aws.Request{Method: "GET", Path: "/test.txt", Fields: []aws.Field{{"range", "bytes=0-9"}}, Digest: empty})
	f("98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd", aws.Request{
		Method: "PUT", Path: aws.Escape("/test$file.text", true), Fields: []aws.Field{{"x-amz-storage-class", "REDUCED_REDUNDANCY"}, {"date", "Fri, 24 May 2013 00:00:00 GMT"}},
		Digest: "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
	})
	f("fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543", aws.Request{Method: "GET", Path: "/", Query: "lifecycle=", Digest: empty})
	f("34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7", aws.Request{Method: "GET", Path: "/", Query: aws.Query(map[string]string{"prefix": "J", "max-keys": "2"}), Digest: empty})
	r := aws.Request{Method: "GET", Path: "/", Query: "lifecycle=", Host: "examplebucket.s3.amazonaws.com", Digest: empty}
	other := aws.Credentials{ID: c.ID, Secret: "another"}
	if got := s.Sign(&r, other, now); strings.HasSuffix(got[len(got)-1].Value, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543") {
		t.Error("two secrets sign alike")
	}
}

func TestEscape(t *testing.T) {
	for _, c := range []struct {
		text, want string
		path       bool
	}{{"a/b@c d~", "a/b%40c%20d~", true}, {"a/b+c=é", "a%2Fb%2Bc%3D%C3%A9", false}, {"", "", true}} {
		if got := aws.Escape(c.text, c.path); got != c.want {
			t.Errorf("%q: %q", c.text, got)
		}
	}
}

// Escaping leaves the bytes that RFC 3986 calls unreserved, and slashes in a path.
func TestEscapeEachByte(t *testing.T) {
	const stay = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~"
	for b := range 256 {
		text := string([]byte{byte(b)})
		for _, path := range []bool{false, true} {
			want := fmt.Sprintf("%%%02X", b)
			if strings.Contains(stay, text) || path && text == "/" {
				want = text
			}
			if got := aws.Escape(text, path); got != want {
				t.Errorf("%q: %q, want %q", text, got, want)
			}
		}
	}
}

// scripted is a source whose answers a test sets.
type scripted struct {
	n    int
	find func(n int) (aws.Credentials, error)
}

func (s *scripted) Find(context.Context) (aws.Credentials, error) {
	s.n++
	return s.find(s.n)
}

func (*scripted) Name() string { return "a script" }

// Credentials are renewed before they end. If that fails, the former ones are used until
// they end. Then each call gets the error, without a look for new ones at each call.
func TestKeeperRenews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		s := &scripted{}
		s.find = func(n int) (aws.Credentials, error) {
			if n > 2 {
				return aws.Credentials{}, broken
			}
			return aws.Credentials{ID: fmt.Sprint(n), Secret: "s", Expires: time.Now().Add(time.Hour)}, nil
		}
		k := aws.Keep(&scripted{find: func(int) (aws.Credentials, error) { return aws.Credentials{}, aws.ErrNone }}, s)
		get := func(want string) {
			t.Helper()
			if c, err := k.Get(t.Context()); c.ID != want || (err == nil) != (want != "") {
				t.Errorf("%+v, %v, want %q", c, err, want)
			}
		}
		get("1")
		time.Sleep(50 * time.Minute)
		get("1")
		time.Sleep(6 * time.Minute)
		get("2")
		time.Sleep(58 * time.Minute)
		for range 100 {
			get("2")
		}
		if s.n > 3 {
			t.Errorf("%d looks", s.n)
		}
		time.Sleep(5 * time.Minute)
		for range 100 {
			get("")
		}
		if s.n > 4 {
			t.Errorf("%d looks", s.n)
		}
		if _, err := k.Get(t.Context()); !errors.Is(err, broken) || !strings.Contains(err.Error(), "a script") {
			t.Error(err)
		}
	})
}

// After Reject the Keeper looks for other credentials, unless it has found others already.
func TestKeeperRejects(t *testing.T) {
	s := &scripted{find: func(n int) (aws.Credentials, error) {
		return aws.Credentials{ID: fmt.Sprint(n), Secret: "s", Expires: time.Now().Add(time.Hour)}, nil
	}}
	k := aws.Keep(s)
	first, err := k.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	k.Reject(first)
	k.Reject(first) // as all calls that had them do
	second, err := k.Get(t.Context())
	k.Reject(first)
	if third, _ := k.Get(t.Context()); err != nil || second.ID != "2" || third.ID != "2" {
		t.Errorf("%+v, %+v, %v", second, third, err)
	}
}

// unset unsets all of Amazon's variables, and sets an empty home directory.
func unset(t *testing.T) (home string) {
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "AWS_") {
			t.Setenv(name, "")
		}
	}
	home = t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	return home
}

func find(t *testing.T, sts string) (aws.Credentials, string, error) {
	k := aws.Keep(aws.Default("eu-west-1", sts)...)
	c, err := k.Get(t.Context())
	return c, k.Source(), err
}

const document = `{"Code":"Success","AccessKeyId":"id","SecretAccessKey":"secret","Token":"token","Expiration":"2999-01-02T03:04:05Z"}`

// Each source is found if the sources before it are empty.
func TestSources(t *testing.T) {
	check := func(t *testing.T, sts, from string) {
		t.Helper()
		c, source, err := find(t, sts)
		if err != nil || c.ID != "id" || c.Secret != "secret" || c.Token != "token" || !strings.Contains(source, from) {
			t.Errorf("%+v from %q, %v", c, source, err)
		}
	}
	t.Run("none", func(t *testing.T) {
		unset(t)
		if _, _, err := find(t, ""); !errors.Is(err, aws.ErrNone) || strings.Contains(err.Error(), "\n") {
			t.Error(err)
		}
	})
	t.Run("environment", func(t *testing.T) {
		unset(t)
		t.Setenv("AWS_ACCESS_KEY_ID", "id")
		t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
		t.Setenv("AWS_SESSION_TOKEN", "token")
		check(t, "", "AWS_ACCESS_KEY_ID")
	})
	t.Run("file", func(t *testing.T) {
		home := unset(t)
		path := filepath.Join(home, ".aws", "credentials")
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		text := "# comment\n[other]\naws_access_key_id = x\naws_secret_access_key=x\n[default]\naws_access_key_id=id\n aws_secret_access_key = secret\naws_session_token=token\n[more]\naws_access_key_id=y\n"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		check(t, "", "profile")
		t.Setenv("AWS_PROFILE", "more")
		if _, _, err := find(t, ""); err == nil || !strings.Contains(err.Error(), `"more"`) {
			t.Errorf("a profile without a secret: %v", err)
		}
	})
	t.Run("web identity", func(t *testing.T) {
		home := unset(t)
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.FormValue("Action") != "AssumeRoleWithWebIdentity" || r.FormValue("RoleArn") != "arn:role" || r.FormValue("RoleSessionName") == "" || r.FormValue("WebIdentityToken") != "jwt" {
				http.Error(w, "<Error>", http.StatusForbidden)
				return
			}
			fmt.Fprint(w, `<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>id</AccessKeyId><SecretAccessKey>secret</SecretAccessKey><SessionToken>token</SessionToken><Expiration>2999-01-02T03:04:05Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>`)
		}))
		defer s.Close()
		path := filepath.Join(home, "jwt")
		if err := os.WriteFile(path, []byte("jwt\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Setenv("AWS_WEB_IDENTITY_TOKEN_FILE", path)
		t.Setenv("AWS_ROLE_ARN", "arn:role")
		check(t, s.URL, "AWS_WEB_IDENTITY_TOKEN_FILE")
		t.Setenv("AWS_ROLE_ARN", "arn:other")
		if _, _, err := find(t, s.URL); err == nil || errors.Is(err, aws.ErrNone) {
			t.Errorf("another role: %v", err)
		}
	})
	t.Run("container", func(t *testing.T) {
		unset(t)
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "let me in" {
				http.Error(w, "no", http.StatusUnauthorized)
				return
			}
			fmt.Fprint(w, document)
		}))
		defer s.Close()
		t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", s.URL+"/role")
		t.Setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "let me in")
		check(t, "", "container")
	})
	t.Run("instance", func(t *testing.T) {
		unset(t)
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.Method == http.MethodPut && r.URL.Path == "/latest/api/token":
				fmt.Fprint(w, "session")
			case r.Header.Get("X-Aws-Ec2-Metadata-Token") != "session":
				http.Error(w, "no", http.StatusUnauthorized)
			case strings.HasSuffix(r.URL.Path, "/security-credentials/"):
				fmt.Fprint(w, "the-role")
			case strings.HasSuffix(r.URL.Path, "/security-credentials/the-role"):
				fmt.Fprint(w, document)
			default:
				http.NotFound(w, r)
			}
		}))
		defer s.Close()
		t.Setenv("AWS_EC2_METADATA_DISABLED", "")
		t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", s.URL)
		check(t, "", "instance")
	})
}
