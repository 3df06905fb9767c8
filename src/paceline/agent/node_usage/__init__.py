"""What a node uses: CPU, memory, network, disks and GPUs, recorded while a run trains."""
