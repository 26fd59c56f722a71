#!/bin/sh
# Install the agent from the folder that this file is in. No network, no Python; may be run again.
#   ./install.sh                install this version, or upgrade to it
#   ./install.sh rollback       back to the version before; the same again undoes that
#   ./install.sh uninstall      remove the program; configuration and state stay
#   --root DIR                  in DIR instead of /, for an image; no users are made then
# Running agents keep the version that they were started with, whose files stay until they end;
# restart them one by one.
# Hosts that the program cannot run on are refused: Linux x86-64 with glibc 2.31 or newer is needed.
set -eu
umask 022
here=$(cd "$(dirname "$0")" && pwd -P)
root='' action=install
while [ $# -gt 0 ]; do
  case "$1" in
    install | rollback | uninstall) action=$1; shift ;;
    --root) root=${2:?--root DIR}; root=${root%/}; shift 2 ;;
    *) echo "usage: install.sh [install|rollback|uninstall] [--root DIR]" >&2; exit 2 ;;
  esac
done
fail() { echo "install.sh: $*" >&2; exit 1; }

home=/opt/asyncgrpo-agent
versions=$root$home/versions
units=$root/etc/systemd/system
config=$root/etc/asyncgrpo-agent
program=$root/usr/local/bin/asyncgrpo-agent

# What a link below $home points to, as a name in versions/; empty without one.
target() { readlink "$root$home/$1" 2>/dev/null | sed 's#^versions/##' || :; }

# Point a link elsewhere in one step: whoever starts an agent finds the old or the new.
point() {
  ln -sfn "versions/$2" "$root$home/.$1.new"
  mv -T "$root$home/.$1.new" "$root$home/$1"
}

# Whether a program of this folder runs; of other users' programs only root is told.
is_running() { ls -l /proc/[0-9]*/exe 2>/dev/null | grep -qF -- "-> $1/"; }

place_units() {
  mkdir -p "$units"
  for unit in "$versions/$1"/systemd/*; do cp "$unit" "$units/"; done
  reload
}
reload() {
  if [ -z "$root" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
}

check() {
  cd "$here"
  [ -f FILES.sha256 ] && [ -f VERSION ] || fail "$here is no whole archive; nothing was changed"
  sha256sum --check --quiet --strict FILES.sha256 >/dev/null 2>&1 ||
    fail "files are damaged or missing: unpack the archive again; nothing was changed.
$(sha256sum --check --quiet FILES.sha256 2>&1 | head -n 3)"
  listed=$(wc -l <FILES.sha256)
  present=$(find . -type f ! -name FILES.sha256 | wc -l)
  [ "$listed" -eq "$present" ] || fail "there are files that no archive had; nothing was changed"
}

# With --root the files are for another host.
check_host() {
  [ -z "$root" ] || return 0
  host="$(uname -s) on $(uname -m)"
  [ "$host" = "Linux on x86_64" ] ||
    fail "$host is not supported: take a Linux x86-64 host; nothing was changed"
  said=$(agent/asyncgrpo-agent --version 2>&1) || case "$said" in
    *GLIBC_*) fail "this host is older than the program allows; nothing was changed.
$said" ;;
  esac
}

install_version() {
  check
  check_host
  version=$(cat VERSION)
  mkdir -p "$versions"
  if ! cmp -s FILES.sha256 "$versions/$version/FILES.sha256"; then
    rm -rf "$versions/.new"
    cp -R "$here" "$versions/.new"
    rm -rf "${versions:?}/$version"
    mv "$versions/.new" "$versions/$version"
  fi
  before=$(target current)
  if [ -n "$before" ] && [ "$before" != "$version" ]; then point previous "$before"; fi
  point current "$version"
  kept=$(target previous)
  for folder in "$versions"/*; do
    case "${folder##*/}" in "$version" | "$kept") continue ;; esac
    is_running "$folder" || rm -rf "$folder"
  done
  place_units "$version"
  mkdir -p "$config" "${program%/*}"
  chmod 755 "$config"
  mkdir -p "$config/examples"
  cp examples/* "$config/examples/"
  ln -sfn "$home/current/agent/asyncgrpo-agent" "$program"
  make_users
  echo "installed $version${before:+ (before: $before)}"
}

make_users() {
  [ -z "$root" ] || return 0
  for name in asyncgrpo asyncgrpo-mount; do
    id "$name" >/dev/null 2>&1 ||
      useradd --system --user-group --home-dir /var/lib/asyncgrpo-agent --shell /usr/sbin/nologin \
        "$name" || fail "the user $name cannot be made; make it, and run this again"
  done
}

rollback() {
  now=$(target current) before=$(target previous)
  [ -n "$before" ] && [ -d "$versions/$before" ] || fail "there is no version before ${now:-any}"
  point current "$before"
  point previous "$now"
  place_units "$before"
  echo "back to $before (before: $now)"
}

# What runs would go on without its files, and what is enabled would be missed at the next boot.
stop_units() {
  [ -z "$root" ] && [ -d /run/systemd/system ] || return 0
  for unit in $(systemctl list-units --all --plain --no-legend 'asyncgrpo-*.service' | cut -d' ' -f1); do
    systemctl stop "$unit"
  done
  rm -f "$units"/*.wants/asyncgrpo-*.service
}

uninstall() {
  stop_units
  for unit in asyncgrpo-proxy.service asyncgrpo-trainer.service asyncgrpo-replica@.service \
    asyncgrpo-mount@.service; do
    rm -f "$units/$unit"
  done
  reload
  rm -f "$program"
  rm -rf "$root$home"
  echo "removed; $config and $root/var/lib/asyncgrpo-agent stay"
}

case "$action" in
  install) install_version ;;
  rollback) rollback ;;
  uninstall) uninstall ;;
esac
