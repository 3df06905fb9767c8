#!/usr/bin/env bash
# Runs a command inside another root: enter.sh ROOT REPOSITORY IMAGE COMMAND...
# The root stays as it was built: it is mounted read-only, with fresh folders where programs write. Processes,
# network and host name are its own, and all that was started ends with this command.
set -eu
PATH=$PATH:/usr/sbin:/sbin
if [ "$1" != --inside ]; then
    exec unshare --mount --pid --net --ipc --uts --fork --kill-child "$0" --inside "$@"
fi
root=$2 repository=$3 image=$4
shift 4

mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount --rbind /sys "$root/sys"
for place in tmp run var/tmp root mnt; do mount -t tmpfs -o mode=1777 tmpfs "$root/$place"; done
mkdir "$root/mnt/repository" "$root/mnt/image" "$root/mnt/outer"
mount --bind "$repository" "$root/mnt/repository"
mount -o remount,bind,ro "$root/mnt/repository"
mount --bind "$image" "$root/mnt/image"
mount -o remount,bind,ro "$root/mnt/image"

# Not chroot: Apptainer refuses to work in one.
cd "$root"
pivot_root . mnt/outer
cd /mnt/repository
umount -l /mnt/outer
hostname newer
ip link set lo up
exec env -i HOME=/root USER=root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/mnt/repository/src PYTHONDONTWRITEBYTECODE=1 "$@"
