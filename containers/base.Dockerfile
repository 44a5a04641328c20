# Python alone: for recipes of the kind command, and as a beginning for definitions of your own.
# docker build -f base.Dockerfile -t registry.example.org/hpcml/base:3.12.13-1 .
FROM docker.io/library/python:3.12.13-slim-bookworm

LABEL hpcml.image=base-3.12.13-1
# A base without a locale makes Python print ASCII only.
ENV LC_ALL=C.UTF-8
CMD ["python3"]
