"""`evenkeel deploy`: what Kubernetes, Ray's launcher or Slurm is asked for to run a recipe, from the recipe. Sizes are those that `evenkeel
plan` counts; names, ports and deadlines those that the run has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from evenkeel.actors.config import RunConfig
from evenkeel.correction.errors import ConfigError
from evenkeel.deployment.kuberay import kuberay
from evenkeel.deployment.ray_clusters import aws, local, slurm
from evenkeel.plan.layouts import Gpus

_MOUNT, _NAMESPACE = "/shared", "default"


def as_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Documents as one file. A text of several lines stands there as it is read."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
    )
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, explicit_start=True, width=120)


def deploy(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) of the run; of its model only config.json is read.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.")] = None,
    kuberay_is_meant: Annotated[bool, typer.Option("--kuberay", help="For Kubernetes with KubeRay, 1.6 or newer.")] = False,
    aws_is_meant: Annotated[bool, typer.Option("--aws", help="For `ray up` on AWS, in containers.")] = False,
    local_is_meant: Annotated[bool, typer.Option("--local", help="For `ray up` on hosts of your own, by ssh.")] = False,
    slurm_is_meant: Annotated[bool, typer.Option("--slurm", help="For sbatch, with deploy/slurm.sh.")] = False,
    image: Annotated[str, typer.Option(help="Container image that deploy/Dockerfile builds, in a registry that the nodes reach.")] = "",
    volume: Annotated[
        str,
        typer.Option(metavar="NAME", help="What holds run folder and model: a claim (PVC, ReadWriteMany), on AWS an NFS server."),
    ] = "",
    mount: Annotated[str, typer.Option(metavar="FOLDER", help="Where all nodes see it; run_dir and model are below.")] = _MOUNT,
    namespace: Annotated[
        str, typer.Option(metavar="NAME", help="With --kuberay, the namespace of all that is printed; Prometheus finds the run by it.")
    ] = _NAMESPACE,
    cluster_alone: Annotated[bool, typer.Option("--cluster", help="With --kuberay, the cluster without a run (RayCluster).")] = False,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", metavar="ADDRESS", help="With --local, once for each host; the first is the head.")
    ] = None,
    gpus: Annotated[str, typer.Option(metavar="NAMExCOUNT", help="GPUs of a node; of a pod the most that it may have.")] = "H100x8",
) -> None:
    """Print what is asked for to run a recipe: YAML for `kubectl apply -f -` or `ray up`, or a script for `sbatch`.

    --kuberay: a RayJob with its cluster (head, learner, rollouts), or with --cluster that cluster as a RayCluster, the recipe as a
    ConfigMap, and a Service, PodMonitor and ScrapeConfig for the Prometheus operator. --aws and --local: a cluster, to which `ray job
    submit` brings the run. --slurm: a cluster and its run.
    Numbers of nodes, memory, shared memory and object store are those that `evenkeel plan` counts; the resource that workers ask for,
    ports, grace and waiting times are the run's own (deploy/README.md).
    """
    from evenkeel.doctor.start_checks import check_on_paper_or_refuse
    from evenkeel.recipe import as_recipe, load_config

    meant = [kuberay_is_meant, aws_is_meant, local_is_meant, slurm_is_meant]
    if sum(meant) != 1:
        raise ConfigError("evenkeel deploy needs one of --kuberay, --aws, --local and --slurm")
    if (kuberay_is_meant or aws_is_meant) and not (image and volume):
        raise ConfigError(
            "evenkeel deploy --kuberay and --aws need --image and --volume, such as --image REGISTRY/evenkeel:gpu --volume shared"
        )
    if local_is_meant and not hosts:
        raise ConfigError("evenkeel deploy --local needs --host, once for each host, such as --host 10.0.0.1 --host 10.0.0.2")
    if hosts and not local_is_meant:
        raise ConfigError("evenkeel deploy takes --host with --local alone: other clusters find their nodes themselves")
    if (image or volume or mount != _MOUNT) and (local_is_meant or slurm_is_meant):
        raise ConfigError(
            "evenkeel deploy takes --image, --volume and --mount with --kuberay and --aws alone: other hosts have code and folders there"
        )
    if cluster_alone and not kuberay_is_meant:
        raise ConfigError("evenkeel deploy takes --cluster with --kuberay alone: --aws and --local print a cluster without a run anyway")
    if namespace != _NAMESPACE and not kuberay_is_meant:
        raise ConfigError("evenkeel deploy takes --namespace with --kuberay alone: it is one of Kubernetes")
    kind = Gpus.parse(gpus)
    if kind.nodes > 1:
        raise ConfigError(
            f"--gpus {gpus}: evenkeel deploy counts the nodes itself, from the recipe. Write {kind.name}x{kind.per_node}, GPUs of one node"
        )
    given = load_config(RunConfig, recipe, overrides or [])
    found = check_on_paper_or_refuse(given, has_gpu=True, meant=[kind])
    if isinstance(found, list):
        raise ConfigError(str(next(one for one in found if one.severity == "fail")))
    config, facts = found
    if kuberay_is_meant:
        where = {"image": image, "claim": volume, "mount": mount, "namespace": namespace}
        text = as_yaml(kuberay(config, as_recipe(given), facts.shape, kind, **where, with_job=not cluster_alone))
    elif aws_is_meant:
        text = as_yaml([aws(config, facts.shape, kind, image=image, volume=volume, mount=mount)])
    elif local_is_meant:
        text = as_yaml([local(config, facts.shape, kind, hosts=hosts or [])])
    else:
        text = slurm(config, facts.shape, kind, [str(recipe), *(overrides or [])])
    typer.echo(text, nl=False)
