#!/usr/bin/env bash
# What the tests need of the system: installed here as root on Debian or Ubuntu, named otherwise.
set -u
cd "$(dirname "$0")/.." && mkdir -p .make
packages="slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins iproute2 openmpi-bin libopenmpi-dev shellcheck lmod debootstrap chromium openssh-server libpam-oath oathtool rsync zsh fish tcsh"
missing=$(for each in $packages; do dpkg -s "$each" >/dev/null 2>&1 || echo "$each"; done)
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing for the tests:" $missing
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >.make/apt.log 2>&1 && exit 0
    tail -n 20 .make/apt.log
    exit 1
fi
echo "these tests will be skipped for want of packages:" $missing
