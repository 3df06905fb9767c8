"""Fetch results: copy files of a run folder over the connection, resumably and verified.

It works the same on all clusters: Paceline on the other side sends what this side lacks, without rsync. Each file
is sent from where its local part ends, with a checksum of the whole file that is computed where it comes from. It gets
its name here once that checksum is right. A checkpoint gets its name once all its files have arrived and its marker
confirms them.
"""
